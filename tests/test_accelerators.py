"""Milliseconds counted in compiled text, and a table that goes on; no compiler of TPUs."""

import jax
import pytest

from experiments.speed import accelerators, counted
from vit import devices, dry_run
from vit import topologies as there_are

BUNDLES = """
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %v2 = vld [vmem] }
   0x2   : > { %v3 = vadd.f32 %v2, %v2 }
   0x3   : > { %p1 = scmp.ge.s32.totalorder %s4, 10 /* loop exit test */ }
   0x4   :  { %s5 = smov 1 }
"""

PROGRAM = """
%fused (x: f32[8]) -> f32[8] {
  ROOT %y = f32[8]{0} add(%x, %x)
}
ENTRY %main (p: f32[1024,1024]) -> bf16[1024] {
  %p = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  %a = f32[1024,1024]{1,0:T(8,128)S(1)} fusion(%p), kind=kLoop, calls=%fused
  ROOT %b = bf16[1024]{0:T(1024)} fusion(%a), kind=kLoop, calls=%fused
}
"""


def test_bundles_in_a_loop_count_as_often_as_it_turns():
    """The bundles after its test, four at most, are still of the loop."""
    assert counted.bundles(BUNDLES) == 1 + 4 * 10


def test_a_kernel_has_the_larger_of_cycles_and_traffic():
    """What lies in the core's memory moves nothing."""
    bandwidth = 1e9
    read = 1e3 * 4 * 2**20 / bandwidth
    assert counted.milliseconds(PROGRAM, {}, bandwidth) == pytest.approx(read + 2048e3 / bandwidth)
    cycles = {"a": 1e3, "b": 3 * counted.CLOCK}
    assert counted.milliseconds(PROGRAM, cycles, bandwidth) == pytest.approx(read + 3e3)


@pytest.mark.parametrize(
    ("kind", "shape", "moved"),
    [
        ("copy-start", "(f32[1024]{0:S(1)}, f32[1024]{0}, u32[]{:S(2)})", 4096),
        ("copy-start", "(f32[1024]{0}, f32[1024]{0:S(1)}, u32[]{:S(2)})", 4096),
        ("slice-start", "((f32[1024]{0}), f32[256]{0:S(1)}, s32[]{:S(2)})", 1024),
    ],
)
def test_a_copy_moves_what_it_returns(kind, shape, moved):
    """Into the core's memory or out of it; of a slice, not all of its operand."""
    text = f"ENTRY %main () -> f32[1] {{\n  %a = {shape} {kind}(%p), slice={{[0:256]}}\n}}\n"
    assert counted.milliseconds(text, {}, 1.0) == 1e3 * moved


def test_a_loop_around_kernels_is_refused():
    with pytest.raises(ValueError, match="with a loop around its kernels"):
        counted.milliseconds(PROGRAM.replace("fusion(%a)", "while(%a)"), {}, 1e9)


def test_a_table_goes_on(tmp_path):
    """Rows that are there are not made again, also after one that failed."""
    made = []

    def row(name, number):
        made.append((name, number))
        if number == 3 and made.count((name, number)) == 1:
            raise KeyboardInterrupt
        return {"name": name, "number": number, "value": "" if number == 2 else 0.5}

    wanted = [("a/16", n) for n in (1, 2, 3, 4)]
    with pytest.raises(KeyboardInterrupt):
        accelerators.table(wanted, ("name", "number"), row, tmp_path / "rows")
    rows = accelerators.table(wanted, ("name", "number"), row, tmp_path / "rows")
    assert [x["number"] for x in rows] == [1, 2, 3, 4]
    assert made.count(("a/16", 1)) == made.count(("a/16", 2)) == 1
    assert accelerators.known(tmp_path / "rows.csv") == rows
    assert accelerators.NOTE in (tmp_path / "rows.md").read_text()


def test_a_step_that_does_not_fit_is_a_row_too(monkeypatch):
    """The compiler of TPUs ends with an error there; the rows after it are still wanted."""
    cost = dry_run.Cost(1.0, {"in all": 2.0**30}, 3e12, 2.0**31, {"all-reduce": (2, 2**20)})

    answers = iter([cost, None])

    def compiled(*program, gpu):
        if (answer := next(answers)) is None:
            raise ValueError("train_step does not fit")
        return answer

    monkeypatch.setattr(there_are, "devices", lambda name: jax.devices()[:1])
    monkeypatch.setattr(devices, "peak_of", lambda kind: devices.Peak(1e12, 1e12, 16.0))
    monkeypatch.setattr(dry_run, "compiled", compiled)
    fits, not_ = (accelerators.step("v5e:4x4", "Ti/16", "softmax", 16) for _ in range(2))
    assert list(fits) == list(not_)
    assert (fits["memory, GiB"], fits["roof, images/s"]) == (1, pytest.approx(16 / 3))
    assert (not_["memory, GiB"], not_["TFLOP"]) == ("does not fit", "")


@pytest.mark.parametrize(("times", "says"), [([2, 1, 3], "512"), ([2, 3, 3], "197")])
def test_the_crossing(times, says):
    """Of what is known; where exact attention has no memory it is the dearer."""
    rows = [
        {"tokens": n, "exact, forward": e, "performer, forward": p}
        for n, e, p in zip((197, 512, 1024), (1.5, 2, ""), times, strict=True)
    ]
    if says == "197":
        rows[0]["performer, forward"] = 1
        rows[1]["performer, forward"] = 1
    assert f"from {says} tokens" in accelerators.crossing(rows, "forward")
