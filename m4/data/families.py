"""Families of languages, for colours, filters and tables of reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from m4.data.languages import describe

OTHER = "other"

# family|base languages of BCP 47. From CLDR 48, supplemental/languageGroups (groups of ISO 639-5),
# of the languages that CLDR names; Indo-European by branch, Latin with the Romance languages.
# By hand, after Glottolog, where CLDR has no group: ast, gos, hrx, max, mt, ota, rn, rw, sq, tok
# and some sixty more. "Caucasian" and "American" are several families of a region. A family that
# fills a line continues in the next one.
_TABLE = """\
Germanic|af ang bar da de dum en enm fo frr frs fy gmh goh gos got gsw hrx is jut ksh lb li nb nds
nl nn no non pdc pdt pfl sco sli stq sv swg vls vmf wae yi zea
Romance|an ast ca co crs egl es ext fr frc frm fro frp fur gl it la lad lij lmo
mwl nap oc pcd pms pro pt rgn rm ro rup sc scn sdc vec wa
Slavic|be bg bs cs csb cu dsb hr hsb mk orv pl ru rue sh sk sl sr szl uk
Baltic|lt ltg lv prg sgs
Celtic|br cy ga gd gv kw mga sga
Indo-Iranian|ae anp as awa bal bgc bgn bho bn bpy bqi bra ccp ckb doi dv fa gbz glk gu hi hif jpr
kho khw kiu kok ks ku lah lrc mag mai mr mwr mzn ne or os pa pal peo pi ps raj rhg rom sa saz sd
sdh si sog tg tly trw ttt ur xnr zza
other Indo-European|aln el grc hit hy pnt sq tsd
Turkic|alt az ba chg crh cv gag kaa kk krc kum ky nog ota sah tk tr tt tyv ug uz
Mongolic|bua mn xal
Tungusic|mnc
Uralic|chm et fi fit hu izh koi krl kv liv mdf mrj myv se sel sma smj smn sms udm vep vot vro
Afro-Asiatic|aa aeb akk am ar arc arq ars ary arz bej ber byn cop egy gez ha he jrb kab maf mt om
phn rif sam shi shu sid so ssy syc syr ti tig tmh tru tzm uga wal zen zgh
Niger-Congo|ada agq ak ann asa bas bax bbj bem bez bfd bin bkm blo bm bss bum byv cch cgg dav dua
dyo dyu ebu ee efi eka ewo fan fat ff fon gaa gba grb gur guz hz ibb ig jgo jmc kaj kam kcg kde
ken kfo kg ki kj kkj kmb kpe ksb ksf lag lam lg ln lol loz lsm lu lua lun luy man men mer mgh mgo
mos mua mye nd ng nmg nnh nqo nr nso ny nym nyn nyo nzi rn rof rw rwk sbp seh sg sn snk srr ss st
suk sus sw swb tem tiv tn tog ts tum tw umb vai ve vmw vun wo xh xog yao yav ybb yo zu
Nilo-Saharan|ach din dje dzg kbl khq kln kr luo mas mde nus saq sba ses teo twq
Dravidian|bfq brh gon kn kru kxv ml ta tcy te
Sino-Tibetan|bo brx dz gan hak hsn ii kac lus lzh mni my nan new njo nst nwc wuu yue zh
Austroasiatic|hoc kha km sat vi
Tai-Kadai|blt lo shn th za
Hmong-Mien|hmn hnj
Austronesian|ace ban bbc bew bik bjn bug ceb ch chk cps dtp fil fj gay gil gor haw hil ho iba id
ilo jv kaw kos krj mad mak max mdr mg mh mi min ms mwv na nia niu pag pam pau pon rap rar rtm rug
sas sly sm su tet tkl tl to trv tvl ty war yap
Japonic|ja
Caucasian|ab ady av ce dar inh ka kbd lez lzz tkr xmf
American|akz ale arn aro arp arw atj ay bla cad car cay chb cho chp chr chy cic clc cr crj crk crl
crm crr csw dak del den dgr esu gn guc gwi hai hax hup hur ik ikt iu kgp kl kut kwk lil lkt lui
mic moe moh mus nv oj ojb ojc ojs ojw oka osa pqm qu quc qug see sei slh str tce ter tgx tht tli
tsi ttm was yrl zap zun
creole|bi cbk chn crg ht jam kea kri lou mfe pap pcm pis srn tpi
constructed|afh avk eo ia ie io jbo lfn nov tlh tok toki tzl vo zbl
isolate|ain eu ko
"""


def _parse() -> dict[str, str]:
    families, family = {}, ""
    for line in _TABLE.splitlines():
        name, bar, codes = line.rpartition("|")
        family = name if bar else family
        families |= dict.fromkeys(codes.split(), family)
    return families


_FAMILIES = _parse()


def family_of(code: str) -> str:
    """Returns the family of a code, by its base language: 'Romance' for 'glg' and 'gl_ES'.

    It is 'other' for languages that the table does not have.
    """
    base = describe(code).code.split("_")[0]
    return _FAMILIES.get(base) or _FAMILIES.get(code.split("_")[0], OTHER)


def shown(codes: Iterable[str], most: int) -> dict[str, str]:
    """Returns code -> family for the `most` families with the most codes, and 'other'.

    The largest family comes first, 'other' last.
    """
    family = {code: family_of(code) for code in codes}
    counts = Counter(name for name in family.values() if name != OTHER)
    kept = sorted(counts, key=lambda name: (-counts[name], name))[:most]
    order = {name: rank for rank, name in enumerate(kept)}
    named = {code: name if name in order else OTHER for code, name in family.items()}
    return dict(sorted(named.items(), key=lambda item: order.get(item[1], most)))
