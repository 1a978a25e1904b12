"""The choice among candidates, its reason, and the message where nothing fits; bytes and seconds are scripted here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from edgespec.errors import InvalidRequest
from edgespec.planning import plan as candidates
from edgespec.planning import profiles as quiet
from edgespec.planning.footprint import Memory, MemoryPart
from edgespec.planning.plan import Goal, Option, Plan, PlanRequest, label, largest_context, make_plan
from edgespec.planning.profiles import Profile
from edgespec.planning.speed import Speed
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.options import LoadOptions, RunOptions
from tests.support.planning import SIZES, manifest, profile

pytestmark = pytest.mark.usefixtures("native")  # plans are for native operators

MIB = 1 << 20
BASE = 50 * MIB
KV = 12288  # bytes per token in float16; int8 takes half
EXTRA = {"speculative": 100 * MIB}
RATES = {"int4": 100.0, "w8a8": 70.0, "int8": 60.0, "fp32": 20.0}
GAINS = {"swift": 1.0, "ar": 1.0, "ngram": 1.02, "self-spec": 1.2, "speculative": 1.8, "medusa": 1.5}


def takes(form: str, method: str, context: int, int8: bool = False, batch: int = 1) -> int:
    """Bytes as scripted."""
    kv = KV * context * batch // (2 if int8 else 1)
    return BASE + SIZES[form] + kv + EXTRA.get(method, 0)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(found: Manifest, use: RunOptions, process: int | None = None) -> Memory:
        total = takes(found.target.format, use.method, use.context, use.attention == "int8", use.batch)
        return Memory((MemoryPart("all", private=total),))

    def speed(
        found: Manifest, use: RunOptions, profile: Profile | None, bandwidth: float | None, **streamed: object
    ) -> Speed:
        plain, gain = RATES[found.target.format], GAINS[use.method]
        return Speed(gain, plain * gain, plain, None, "calibrated")

    monkeypatch.setattr(candidates, "memory_of", memory)
    monkeypatch.setattr(candidates, "speed_of", speed)
    monkeypatch.setattr(Memory, "peak", property(lambda self: self.private))


METHODS = ("ar", "ngram", "self-spec", "speculative")


def options(*forms: Any, methods: tuple[str, ...] = METHODS) -> list[Option]:
    return [Option(manifest(form, methods), f"bundle-{form}") for form in forms]


def request(budget: int, goal: Goal = "auto", batch: int = 1, **load: Any) -> PlanRequest:
    return PlanRequest(budget, goal, batch, LoadOptions(operators="native", **load))


def planned(budget: int, *forms: Any, **changes: Any) -> Plan:
    return make_plan(options(*(forms or ("int4",))), request(budget, **changes))


def picked(plan: Plan) -> str:
    assert plan.pick is not None, plan.reason
    return label(plan.pick)


def test_the_fastest_that_fits_is_picked() -> None:
    assert picked(planned(1000 * MIB)) == "int4 speculative"
    tight = planned(takes("int4", "speculative", 4096) - 1)
    assert picked(tight) == "int4 self-spec"
    assert "int4 speculative would be faster but needs" in tight.reason
    assert tight.candidates[0] is tight.pick
    fits = [candidate.fits for candidate in tight.candidates]
    assert fits == sorted(fits, reverse=True)


def test_plain_decoding_where_nothing_is_clearly_faster() -> None:
    plan = make_plan(options("int4", methods=("ar", "ngram")), request(1000 * MIB))
    assert picked(plan) == "int4 ar"  # a gain of 1.02x is not worth a method
    assert "no method was measured to be clearly faster" in plan.reason


def test_of_equally_fast_ones_the_smaller_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GAINS, "self-spec", 1.79)
    assert picked(planned(1000 * MIB)) == "int4 self-spec"


def test_of_equals_the_finer_format_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference that no prediction can tell is worth neither quality nor the word fastest."""
    monkeypatch.setitem(RATES, "w8a8", RATES["int4"])
    monkeypatch.setitem(RATES, "int4", 1.01 * RATES["w8a8"])
    plan = planned(1000 * MIB, "int4", "w8a8")
    assert picked(plan) == "w8a8 speculative"
    assert plan.reason.startswith("as fast as the fastest that fits, as far as a prediction can tell;")
    monkeypatch.setitem(RATES, "int4", 1.1 * RATES["w8a8"])
    plan = planned(1000 * MIB, "int4", "w8a8")
    assert picked(plan) == "int4 speculative"
    assert plan.reason.startswith("the fastest that fits;")


def test_room_for_the_whole_context_is_said_so() -> None:
    whole = options("int4")[0].manifest.target.facts.context
    roomy = planned(1000 * MIB)
    assert f"the model's whole context of {whole} tokens fits this budget" in roomy.hints
    tight = planned(takes("int4", "speculative", whole) - 1)
    assert any(hint.startswith("room for ") for hint in tight.hints)


def test_a_busy_profile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "BUSY", 1.5)
    found = options("int4")
    for spread, said in ((1.0, False), (2.0, True)):
        asked = replace(request(1000 * MIB), profile=profile(found[0].manifest).model_copy(update={"spread": spread}))
        assert any("its times are not used" in hint for hint in make_plan(found, asked).hints) == said


def test_goals() -> None:
    picks = {goal: picked(planned(4000 * MIB, "int4", "int8", "fp32", goal=goal)) for goal in get_args(Goal)}
    fast = dict.fromkeys(("auto", "chat", "batch"), "int4 speculative")
    # int8 loses next to nothing, and is faster than fp32
    assert picks == {**fast, "memory": "int4 self-spec", "quality": "int8 speculative"}
    assert picked(planned(4000 * MIB, "int4", "fp32", goal="quality")) == "fp32 speculative"


def test_the_context_is_cut_only_if_nobody_asked_for_it() -> None:
    budget = takes("int4", "ar", 1024)
    cut = planned(budget)
    assert cut.pick is not None
    assert cut.pick.use.context == 1024 or cut.pick.approximates
    asked = planned(takes("int4", "ar", 4096, int8=True) - 1, context=4096)
    assert asked.pick is None


def test_coarser_keys_only_where_nothing_else_fits() -> None:
    budget = takes("int4", "ar", 4096, int8=True)
    plan = planned(budget, context=4096)
    assert plan.pick is not None
    assert plan.pick.approximates
    assert "int8 keys and values change its text" in plan.reason
    roomy = planned(1000 * MIB, context=4096)
    assert roomy.pick is not None
    assert not roomy.pick.approximates


def test_where_nothing_fits_the_closest_and_the_ways_out_are_named() -> None:
    plan = planned(takes("int4", "ar", 600, int8=True), "int4", "int8", context=8192)
    assert plan.pick is None
    assert "closest is int4" in plan.reason
    assert any("--context" in hint for hint in plan.hints)
    assert any("a budget of" in hint for hint in plan.hints)
    assert not any("--format int4" in hint for hint in plan.hints)  # int4 was among them


def test_the_hinted_context_fits() -> None:
    budget = takes("int8", "ar", 3000)
    plan = planned(budget, "int8", context=8192)
    assert plan.pick is None
    hint = next(hint for hint in plan.hints if "--context" in hint)
    context = int(hint.split("--context ")[1].split()[0])
    attention = "int8" if "--attention int8" in hint else None
    assert planned(budget, "int8", context=context, attention=attention).pick is not None
    assert any("--format int4" in hint for hint in plan.hints)


def test_largest_context() -> None:
    (option,) = options("int4")
    use, asked = RunOptions("ar"), request(takes("int4", "ar", 3000))
    found = largest_context(option, use, asked)
    assert takes("int4", "ar", found) <= asked.budget < takes("int4", "ar", found + 65)
    assert largest_context(option, use, request(10**12)) == option.manifest.target.facts.context
    assert largest_context(option, use, request(takes("int4", "ar", 100))) == 0


def test_what_has_to_be_made_first_is_not_picked_but_hinted() -> None:
    (option,) = options("int4", methods=("ar", "medusa"))
    plan = make_plan([replace(option, needs={"medusa": "needs trained heads"})], request(1000 * MIB))
    assert picked(plan) == "int4 ar"
    assert any("medusa: 1.50x, but needs trained heads" in hint for hint in plan.hints)


def test_batches_count_their_keys() -> None:
    budget = takes("int4", "ar", 4096, batch=4)
    assert planned(budget, context=4096, batch=4, goal="batch").pick is not None
    assert picked(planned(budget - 1, context=4096, batch=4, goal="batch")) == "int4 self-spec int8 keys"


def test_swift_is_not_for_devices() -> None:
    found = make_plan(options("int4", methods=("ar", "swift")), request(1000 * MIB, device="webgpu"))
    assert [candidate.use.method for candidate in found.candidates] == ["ar"]
    assert {candidate.use.operators for candidate in found.candidates} == {"stock"}
    with pytest.raises(InvalidRequest, match="swift: cannot run on webgpu"):
        make_plan(options("int4", methods=("swift",)), request(1000 * MIB, device="webgpu"))


@pytest.mark.parametrize("changes", [{"context": 1}, {"context": 9000}, {"batch": 0}])
def test_nonsense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="expected"):
        planned(1000 * MIB, **changes)
    with pytest.raises(InvalidRequest, match="nothing to plan for"):
        make_plan([], request(1))
