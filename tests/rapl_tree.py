"""A powercap tree as the kernel shows it, in a folder of the test's own: its counters move when a test writes them."""

# What most processors wrap at.
WRAP_UJ = 262_143_328_850


def domain(root, folder="intel-rapl:0", name="package-0", energy_uj=0, wrap_uj=WRAP_UJ):
    """One domain under the tree's root; returns its counter file."""
    place = root / folder
    place.mkdir(parents=True)
    (place / "name").write_text(f"{name}\n")
    (place / "energy_uj").write_text(f"{energy_uj}\n")
    (place / "max_energy_range_uj").write_text(f"{wrap_uj}\n")
    return place / "energy_uj"
