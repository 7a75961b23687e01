"""Languages: the 137 of the embedded corpus in its order of size, and others from CLDR."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from m4.data.cldr import tags

# ISO 15924, of scripts that somebody writes today.
RIGHT_TO_LEFT = ("Arab", "Aran", "Hebr", "Syrc", "Thaa", "Nkoo", "Adlm", "Rohg", "Mand", "Samr")


@dataclass(frozen=True)
class Language:
    """A language as m4 names it.

    Attributes:
        code: CLDR identifier.
        iso639_3: ISO 639-3 code.
        name: English name.
        script: ISO 15924 script.
        branch: Branch of its family.
        rtl: True if it is written from right to left.
    """

    code: str
    iso639_3: str
    name: str
    script: str
    branch: str
    rtl: bool


# code|ISO 639-3|name|script|branch; the order is the rank of the power-law sizes of `cldr`.
_TABLE = """\
es|spa|Spanish|Latn|romance
fr|fra|French|Latn|romance
de|deu|German|Latn|germanic
ru|rus|Russian|Cyrl|slavic-e
pt|por|Portuguese|Latn|romance
it|ita|Italian|Latn|romance
nl|nld|Dutch|Latn|germanic
pl|pol|Polish|Latn|slavic-w
ja|jpn|Japanese|Jpan|japonic
zh|cmn|Chinese (Simplified)|Hans|sinitic
ar|arb|Arabic|Arab|semitic
tr|tur|Turkish|Latn|turkic
cs|ces|Czech|Latn|slavic-w
uk|ukr|Ukrainian|Cyrl|slavic-e
sv|swe|Swedish|Latn|nordic
hi|hin|Hindi|Deva|indic
id|ind|Indonesian|Latn|malayic
ko|kor|Korean|Hang|koreanic
vi|vie|Vietnamese|Latn|vietic
fi|fin|Finnish|Latn|uralic
el|ell|Greek|Grek|hellenic
hu|hun|Hungarian|Latn|uralic
ro|ron|Romanian|Latn|romance
da|dan|Danish|Latn|nordic
nb|nob|Norwegian Bokmål|Latn|nordic
he|heb|Hebrew|Hebr|semitic
bg|bul|Bulgarian|Cyrl|slavic-s
th|tha|Thai|Thai|tai
fa|pes|Persian|Arab|iranic
ca|cat|Catalan|Latn|romance
hr|hrv|Croatian|Latn|slavic-s
sr|srp|Serbian (Cyrillic)|Cyrl|slavic-s
sk|slk|Slovak|Latn|slavic-w
lt|lit|Lithuanian|Latn|baltic
et|est|Estonian|Latn|uralic
bn|ben|Bangla|Beng|indic
ta|tam|Tamil|Taml|dravidian
sl|slv|Slovenian|Latn|slavic-s
lv|lvs|Latvian|Latn|baltic
ms|zsm|Malay|Latn|malayic
sw|swh|Swahili|Latn|bantu
ur|urd|Urdu|Arab|indic
te|tel|Telugu|Telu|dravidian
mr|mar|Marathi|Deva|indic
ka|kat|Georgian|Geor|kartvelian
kk|kaz|Kazakh|Cyrl|turkic
az|azj|Azerbaijani|Latn|turkic
hy|hye|Armenian|Armn|armenian
eu|eus|Basque|Latn|isolate
is|isl|Icelandic|Latn|nordic
sq|als|Albanian|Latn|albanian
zh_Hant|cmn|Chinese (Traditional)|Hant|sinitic
gu|guj|Gujarati|Gujr|indic
kn|kan|Kannada|Knda|dravidian
ml|mal|Malayalam|Mlym|dravidian
ne|npi|Nepali|Deva|indic
pa|pan|Punjabi|Guru|indic
si|sin|Sinhala|Sinh|indic
uz|uzn|Uzbek|Latn|turkic
am|amh|Amharic|Ethi|semitic
km|khm|Khmer|Khmr|khmer
my|mya|Burmese|Mymr|burmic
lo|lao|Lao|Laoo|tai
mn|khk|Mongolian|Cyrl|mongolic
fil|fil|Filipino|Latn|philippine
cy|cym|Welsh|Latn|celtic
ga|gle|Irish|Latn|celtic
af|afr|Afrikaans|Latn|germanic
so|som|Somali|Latn|cushitic
ha|hau|Hausa|Latn|chadic
yo|yor|Yoruba|Latn|volta-niger
ig|ibo|Igbo|Latn|volta-niger
zu|zul|Zulu|Latn|bantu
or|ory|Odia|Orya|indic
as|asm|Assamese|Beng|indic
ky|kir|Kyrgyz|Cyrl|turkic
tk|tuk|Turkmen|Latn|turkic
ps|pbt|Pashto|Arab|iranic
sd|snd|Sindhi|Arab|indic
jv|jav|Javanese|Latn|malayic
eo|epo|Esperanto|Latn|constructed
gl|glg|Galician|Latn|romance
ast|ast|Asturian|Latn|romance
oc|oci|Occitan|Latn|romance
sc|srd|Sardinian|Latn|romance
vec|vec|Venetian|Latn|romance
lij|lij|Ligurian|Latn|romance
scn|scn|Sicilian|Latn|romance
fur|fur|Friulian|Latn|romance
rm|roh|Romansh|Latn|romance
kea|kea|Kabuverdianu|Latn|romance
an|arg|Aragonese|Latn|romance
ia|ina|Interlingua|Latn|constructed
fy|fry|Western Frisian|Latn|germanic
nds|nds|Low German|Latn|germanic
lb|ltz|Luxembourgish|Latn|germanic
gsw|gsw|Swiss German|Latn|germanic
frr|frr|Northern Frisian|Latn|germanic
yi|ydd|Yiddish|Hebr|germanic
nn|nno|Norwegian Nynorsk|Latn|nordic
fo|fao|Faroese|Latn|nordic
be|bel|Belarusian|Cyrl|slavic-e
mk|mkd|Macedonian|Cyrl|slavic-s
bs|bos|Bosnian|Latn|slavic-s
sr_Latn|srp|Serbian (Latin)|Latn|slavic-s
hsb|hsb|Upper Sorbian|Latn|slavic-w
dsb|dsb|Lower Sorbian|Latn|slavic-w
szl|szl|Silesian|Latn|slavic-w
tt|tat|Tatar|Cyrl|turkic
cv|chv|Chuvash|Cyrl|turkic
ug|uig|Uyghur|Arab|turkic
ku|kmr|Kurdish|Latn|iranic
ckb|ckb|Central Kurdish|Arab|iranic
tg|tgk|Tajik|Cyrl|iranic
br|bre|Breton|Latn|celtic
gd|gla|Scottish Gaelic|Latn|celtic
mt|mlt|Maltese|Latn|semitic
ti|tir|Tigrinya|Ethi|semitic
kok|gom|Konkani|Deva|indic
mai|mai|Maithili|Deva|indic
ceb|ceb|Cebuano|Latn|philippine
bew|bew|Betawi|Latn|malayic
yue|yue|Cantonese|Hant|sinitic
xh|xho|Xhosa|Latn|bantu
ln|lin|Lingala|Latn|bantu
om|gaz|Oromo|Latn|cushitic
wo|wol|Wolof|Latn|atlantic
ee|ewe|Ewe|Latn|gbe
ak|aka|Akan|Latn|kwa
to|ton|Tongan|Latn|polynesian
mi|mri|Māori|Latn|polynesian
qu|quz|Quechua|Latn|quechuan
chr|chr|Cherokee|Cher|iroquoian
se|sme|Northern Sami|Latn|uralic
pcm|pcm|Nigerian Pidgin|Latn|creole
sah|sah|Yakut|Cyrl|turkic
ce|che|Chechen|Cyrl|nakh
"""


def _parse(line: str) -> Language:
    code, iso, name, script, branch = line.split("|")
    return Language(code, iso, name, script, branch, script in RIGHT_TO_LEFT)


LANGUAGES: dict[str, Language] = {
    language.code: language for language in map(_parse, _TABLE.splitlines())
}

# Languages whose texts in CLDR are nearly each other's: a third to nearly all of the renderings
# are identical, so a high score in one says little where the model is trained on the other.
_GROUPS = (("nb", "nn"), ("hr", "bs", "sr_Latn"), ("hsb", "dsb"))
_ISO = {
    code: language
    for language in reversed(LANGUAGES.values())
    for code in (language.iso639_3, f"{language.iso639_3}_{language.script}")
}
_BY_SCRIPT = {(code.split("_")[0], known.script): known for code, known in LANGUAGES.items()}
_BY_SCRIPT["ko", "Kore"] = LANGUAGES["ko"]  # CLDR's name for Hangul with Chinese characters
# A macrolanguage that CLDR keeps apart from the language that is meant.
_MEANT = {"no": "nb"}


def listed(code: str) -> Language | None:
    """Returns the language of m4's table with this code, or None.

    The code is m4's ('gl', 'zh_Hant') or that of ISO 639-3, with or without a script ('srp_Latn').
    """
    return LANGUAGES.get(code) or _ISO.get(code)


@lru_cache(maxsize=4096)
def describe(code: str) -> Language:
    """Returns the language of a code.

    The code may be m4's, ISO 639-3's, or any tag of BCP 47 with '-' or '_' ('pt_BR', 'zh-Hant',
    'kab'), for which CLDR knows name and likely script. An unknown code names itself: users may
    bring their own. The result's `code` is that of the table or of CLDR; it is not a key.
    """
    if known := listed(code):
        return known
    if (tag := tags.parse(code)) is None:
        return Language(code, code, code, "", "", False)
    tag = tag._replace(language=_MEANT.get(tag.language, tag.language))
    same = _BY_SCRIPT.get((tag.language, tags.likely_script(tag)))
    if same and not tag.territory and not tag.variants:
        return same
    base = LANGUAGES.get(tag.language)
    script = same.script if same else tags.likely_script(tag)
    name = base.name.split(" (")[0] if base else tags.english_name(tag)
    more = tags.additions(tag)
    return Language(
        str(tag),
        base.iso639_3 if base else tag.language,
        f"{name} ({more})" if more else name,
        script,
        base.branch if base else "",
        script in RIGHT_TO_LEFT,
    )


def is_english(code: str) -> bool:
    """Returns whether a code is English or a variant of it: 'en', 'eng', 'en_GB'."""
    tag = tags.parse(code)
    return tag is not None and tag.language == "en"


def split_code(code: str) -> tuple[str, str]:
    """Splits a code into language and ISO 15924 script: 'zh_Hant_TW' -> ('zh', 'Hant').

    Only the part after the language is a script, if it is written as one: 'zh_TW' -> ('zh', '').
    """
    language, _, rest = code.partition("_")
    return language, rest[:4] if re.match(r"[A-Z][a-z]{3}(_|$)", rest) else ""


def closely_related(code: str, among: Iterable[str]) -> list[str]:
    """Returns the languages `among` others whose texts are nearly those of `code`.

    They are in one group of CLDR's, or the same language in the same script, as in another
    territory ('pt' and 'pt_BR').
    """
    base = _base(code)
    group = next((group for group in _GROUPS if base in group), (base,))
    return [other for other in among if other != code and _base(other) in group]


def _base(code: str) -> str:
    """Returns the code without territory: 'sr_Latn' for 'sr_Latn_RS'."""
    known = describe(code)
    if not known.script:
        return code
    language = known.code.split("_")[0]
    same = _BY_SCRIPT.get((language, known.script))
    return same.code if same else f"{language}_{known.script}"
