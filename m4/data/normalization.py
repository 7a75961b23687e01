"""The form in which text becomes ids: Unicode's normal form, with single spaces.

A vocabulary that m4 trains gives back exactly this form: `decode(encode(text)) == normalised(text)`
for every text without control characters.
"""

import unicodedata
from typing import Literal, get_args

# nfc: canonical, é is one character. nfkc: also compatibility, ﬁ is fi and full width is narrow.
Form = Literal["nfc", "nfkc"]
FORMS: tuple[Form, ...] = get_args(Form)


def normalised(text: str, form: Form = "nfc") -> str:
    """Returns the normal form of a text, with each run of spaces of any kind as one space."""
    return " ".join(unicodedata.normalize("NFC" if form == "nfc" else "NFKC", text).split())
