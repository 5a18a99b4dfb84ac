"""Which GPUs are the job's, by every way there is of naming them."""

import pytest

from joulelab.meter.sensors.gpu_selection import Listed, select_gpus

CARDS = (
    Listed(0, "GPU-aa11", "H200", minor=2),
    Listed(1, "GPU-aa22", "H200", minor=0),
    Listed(2, "GPU-bb33", "H200", minor=1, mig_uuids=("MIG-c1", "MIG-c2")),
)


def chosen(wanted="auto", **environ):
    return "".join(str(card.index) for card in select_gpus(CARDS, wanted, environ).cards)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", "20"),
        ("GPU-bb,GPU-aa11", "20"),
        (" 1 , 2 ", "12"),
        ("0,9,1", "0"),  # an invalid entry hides the rest, as CUDA has it
        ("0,-1,1", "0"),
        ("GPU-aa", ""),  # fits two cards, so it names none
        ("GPU-zz", ""),
        ("", ""),
        ("-1", ""),
        ("MIG-c1", "2"),
        ("MIG-c1,MIG-c2", "2"),  # two slices, one meter
        ("MIG-GPU-bb33/7/0", "2"),  # as drivers before R470 named slices
        ("1,1", "1"),
    ],
)
def test_cuda_visible_devices_means_what_it_means_to_cuda(visible, expected):
    assert chosen(CUDA_VISIBLE_DEVICES=visible) == expected


def test_slurm_counts_device_files_and_not_nvml_indices():
    assert chosen(SLURM_JOB_GPUS="1") == "2"
    assert chosen(SLURM_STEP_GPUS="2,0", SLURM_JOB_GPUS="0,1,2") == "01"


def test_cuda_s_variable_goes_before_slurm_s():
    assert chosen(SLURM_JOB_GPUS="1", CUDA_VISIBLE_DEVICES="1") == "1"


def test_cards_a_cgroup_leaves_over_are_the_job_s_whatever_slurm_calls_them():
    selection = select_gpus(CARDS[:1], "auto", {"SLURM_JOB_GPUS": "7"})
    assert [card.index for card in selection.cards] == [0]
    assert "cgroup" in selection.source


def test_without_any_variable_all_cards_are_the_job_s():
    assert chosen() == "012"
    assert chosen(GPU_DEVICE_ORDINAL="1") == "1"


def test_an_explicit_number_counts_the_cards_the_job_was_given():
    assert chosen("0", CUDA_VISIBLE_DEVICES="2,1") == "2"
    assert chosen("none") == ""


def test_an_explicit_uuid_reaches_any_card():
    assert chosen("GPU-aa11", CUDA_VISIBLE_DEVICES="2") == "0"
    assert chosen("MIG-c2") == "2"


def test_numbers_on_a_mixed_node_are_remarked_upon():
    mixed = (CARDS[0], Listed(1, "GPU-x", "A2"))
    numbered = {"CUDA_VISIBLE_DEVICES": "1"}
    assert "CUDA_DEVICE_ORDER" in select_gpus(mixed, "auto", numbered).remark
    assert not select_gpus(mixed, "auto", {**numbered, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).remark
    assert not select_gpus(mixed, "auto", {"CUDA_VISIBLE_DEVICES": "GPU-x"}).remark
