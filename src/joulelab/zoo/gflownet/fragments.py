"""The pieces that molecules are built of. Each `*` is a port: there, and only there, a further fragment can be bonded.

Ports stand where a hydrogen would: a port that stays open becomes one, so that whatever is built has legal valences.
The first ones make a small alphabet of their own: something to branch, to link, to close with.
"""

ABSENT = -1
"""In place of a fragment where there is none."""
FRAGMENTS = (
    "*c1ccc(*)cc1",
    "*N(*)*",
    "*C(*)=O",
    "*C",
    "*O",
    "*C*",
    "*N1CCN(*)CC1",
    "*F",
    # enough for the small alphabet; the rest makes the large one
    "*c1cccc(*)c1",
    "*c1cc(*)cc(*)c1",
    "*c1ccc(*)nc1",
    "*c1cnc(*)nc1",
    "*c1ccc(*)s1",
    "*c1cn(*)cn1",
    "*c1cc(*)[nH]n1",
    "*c1ccc2[nH]cc(*)c2c1",
    "*N1CCC(*)CC1",
    "*C1CCN(*)C1",
    "*C1CCC(*)OC1",
    "*C1CCC(*)CC1",
    "*C1CC1",
    "*C(*)*",
    "*CC*",
    "*C=C*",
    "*O*",
    "*N*",
    "*C(=O)N*",
    "*S(*)(=O)=O",
    "*N",
    "*Cl",
    "*OC",
    "*C#N",
    "*C(F)(F)F",
    "*C(=O)O",
    "*C(N)=O",
    "*S(C)(=O)=O",
)


def ports_of(smiles: str) -> int:
    return smiles.count("*")
