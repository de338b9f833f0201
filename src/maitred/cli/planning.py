"""`maitred plan`: the search's inputs from flags, and what it found as a table, JSON and commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, isinf
from typing import Any

from maitred.cli.command import Options
from maitred.cli.console import aligned, note, seconds_text
from maitred.cli.flags import UsageError, names_in
from maitred.cli.main import EXIT_FAILURE, EXIT_INTERRUPTED
from maitred.cli.plan import MINIMISED, PlanOptions, SearchOptions, check
from maitred.cli.simulate import RATES
from maitred.cli.simulate_inputs import find_target, model_shape, read_workload
from maitred.cli.simulation import write_json, write_report
from maitred.config import SchedulerConfig
from maitred.config.field_checks import require_between
from maitred.engine.installed import installed_policies
from maitred.sim.devices import DEVICES, DoesNotFit
from maitred.sim.engine import EngineSetup
from maitred.sim.layouts import Group, LayoutFigures, PlannedDevice, PlanTerms
from maitred.sim.links import link_named
from maitred.sim.plan import MODES, PlanGoal, Planner
from maitred.sim.report import column
from maitred.sim.results import Objectives
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, WorkloadSpec
from maitred.sim.workload import Demand, Workload

SAMPLED = 4000  # requests of a described workload
DAY_S = 86_400.0


def run_plan(given: Options) -> int:
    options, search = given[PlanOptions], given[SearchOptions]
    check(options)
    demand = Demand(_workload(options, search.seed))
    wanted, terms = _wanted(options, search, demand), _terms(options, search, demand)
    candidates, misfits = _candidates(options, search)
    what = f"{wanted.num_devices} devices" if wanted.rate is None else f"{wanted.rate:,.6g} requests/s"
    note(
        f"{what}; {demand.mean_prompt:,.0f} + {demand.mean_output:,.0f} tokens; {', '.join(c.name for c in candidates)}"
    )
    planner = Planner(wanted, terms, candidates, lambda text: note(text) if text else None)
    if misfits:
        planner.plan.rejected["the weights do not fit"] = misfits
    try:
        planner.search()
    except KeyboardInterrupt:
        planner.plan.is_cut = True
    plan = planner.plan
    told = to_json(planner, options)
    if search.report is not None:
        goals = f"{', '.join(options.slo)} for {options.attainment:.0%} of the requests"
        write_report(search.report, "plan", f"{options.model or 'built-in model'}; {goals}", report_of(planner, told))
    if not write_json(search.json, told):
        print(text_of(planner, told))
    if plan.is_cut:
        note(f"interrupted after {plan.num_simulations} simulations: this is the best so far")
        return EXIT_INTERRUPTED
    return 0 if plan.best else EXIT_FAILURE


# ---- inputs


def _workload(options: PlanOptions, seed: int) -> Workload:
    if options.workload is None:
        described = ClassSpec(input=options.input or "", output=options.output or "")
        return SyntheticWorkload(WorkloadSpec(num_requests=SAMPLED, seed=seed, classes={"all": described}))
    workload = read_workload(options.workload)
    if isinstance(workload, SyntheticWorkload):
        return SyntheticWorkload(replace(workload.spec, num_requests=max(SAMPLED, workload.spec.num_requests)))
    return workload


def _wanted(options: PlanOptions, search: SearchOptions, demand: Demand) -> PlanGoal:
    names_in("--minimise", search.minimise, MINIMISED)
    rate = options.rate
    if options.users is not None:
        rate = options.users * options.requests_per_user_day * options.peak / DAY_S
        require_between("rate", rate, *RATES)
    if rate is None and options.devices is None and not (rate := demand.rate):
        raise UsageError("the workload's requests all come at once; give --rate R or --devices N")
    return PlanGoal(
        rate=rate,
        num_devices=options.devices,
        modes=names_in("--modes", search.modes, MODES),
        minimise=search.minimise,
        max_num_seqs=search.max_num_seqs,
        token_budget=search.max_num_batched_tokens,
    )


def _terms(options: PlanOptions, search: SearchOptions, demand: Demand) -> PlanTerms:
    names_in("--policy", search.policy, installed_policies())
    link = link_named(search.link)
    if link is None and search.modes != "aggregated":
        raise UsageError("--link is none, and workers hand KV over a link; give one, or --modes aggregated")
    scheduler = SchedulerConfig(policy=search.policy)
    return PlanTerms(
        demand=demand,
        objectives=Objectives.parse(options.slo),
        attainment=options.attainment,
        link=link,
        engine=EngineSetup(scheduler=scheduler, num_blocks=1, policies=installed_policies()),
        seed=search.seed,
    )


def _candidates(options: PlanOptions, search: SearchOptions) -> tuple[list[PlannedDevice], int]:
    """Every device alone and several of it as one worker, and how many of them cannot hold the model. Raises
    ConfigError for an unknown device or model."""
    names = list(dict.fromkeys(name.strip() for name in options.device.split(",") if name.strip()))
    if not names:
        raise UsageError(f"--device is {options.device!r} and names none; choose from {', '.join(DEVICES)}")
    prices = dict(_price(word, names) for word in search.price)
    if search.minimise == "cost" and (free := [name for name in names if name not in prices]):
        raise UsageError(f"--minimise cost needs a price of each device; add --price {free[0]}=PRICE")
    degrees = [int(word) if word.strip().isdecimal() else 0 for word in search.parallel.split(",")]
    if not all(1 <= n <= 64 for n in degrees):
        raise UsageError(f"--parallel is {search.parallel!r}; give numbers of devices from 1 to 64, such as 1,2,4,8")
    mixture = any(name in DEVICES for name in names) and model_shape(options.model).experts > 0
    candidates, misfits = [], 0
    for name in names:
        each = [name]
        if name in DEVICES:
            each = [name if n == 1 else f"{name}x{n}" for n in degrees]
            each += [f"{name}x{n}ep" for n in degrees if n > 1 and mixture]
        for one in each:
            try:
                target = find_target(one, options.model)
            except DoesNotFit:
                misfits += 1
                continue
            if search.minimise == "energy" and not target.power_w:
                raise UsageError(f"--minimise energy needs watts, and {one} tells none; name a device of the list")
            candidates.append(PlannedDevice(one, target, prices.get(name, 0.0) * target.num_devices))
    return candidates, misfits


def _price(word: str, names: list[str]) -> tuple[str, float]:
    name, equals, price = word.partition("=")
    try:
        value = float(price)
    except ValueError:
        value = -1.0
    if not equals or not 0 < value < inf:
        raise UsageError(f"--price is {word!r}; write DEVICE=PRICE, for an hour of one, as h100=2.5")
    if name not in names:
        raise UsageError(f"--price is of {name!r}, which is not among --device {','.join(names)}; add it there")
    return name, value


# ---- what was found


def to_json(planner: Planner, options: PlanOptions) -> dict[str, Any]:
    plan = planner.plan
    ordered = sorted(plan.best.values(), key=planner.score)
    pays = plan.pays_from
    return {
        "model": options.model,
        "slo": list(options.slo),
        "attainment": options.attainment,
        "best": ordered[0].layout.mode if ordered else None,
        "plans": [outcome_json(planner, outcome, options) for outcome in ordered],
        "front": [_brief(outcome) for outcome in planner.front()],
        "rejected": dict(plan.rejected.most_common()),
        "slice_parts": [_part(outcome) for outcome in plan.parts],
        "nearest": {name: {"seconds": value, "of": what} for name, (value, what) in plan.nearest.items()},
        "disaggregation_pays_from_bytes_per_s": None if pays is None or isinf(pays) else pays,
        "num_simulations": plan.num_simulations,
        "num_request_steps": plan.num_row_steps,
        "is_cut": plan.is_cut,
    }


def outcome_json(planner: Planner, outcome: LayoutFigures, options: PlanOptions) -> dict[str, Any]:
    layout, speed = outcome.layout, outcome.tokens_per_s
    return {
        **_brief(outcome),
        "handover": layout.handover,
        "num_slices": layout.num_slices,
        "groups": [
            {
                "role": group.role.value,
                "device": group.candidate.name,
                "count": group.count,
                "max_num_seqs": group.max_num_seqs,
                "max_num_batched_tokens": group.token_budget,
            }
            for group in layout.groups
        ],
        **_part(outcome),
        "e2e_s": outcome.figures.e2e_s.to_json(),
        "tokens_per_s_per_device": speed / layout.num_devices,
        "watts_per_device": outcome.watts / layout.num_devices,
        "joules_per_token": outcome.watts / speed,
        "cost_per_million_tokens": layout.price / speed / 3600 * 1e6 if layout.price else None,
        "commands": commands_of(outcome, options),
        "replicas": [words for group in layout.groups for words in [words_of(group, layout.mode)] * group.count],
    }


def _brief(outcome: LayoutFigures) -> dict[str, Any]:
    layout = outcome.layout
    return {
        "mode": layout.mode,
        "layout": layout.label,
        "num_devices": layout.num_devices,
        "price_per_hour": layout.price or None,
        "rate": outcome.rate,
        "mean_e2e_s": outcome.latency_s,
    }


def _part(outcome: LayoutFigures) -> dict[str, Any]:
    """Figures of a slice, or of a part of one."""
    figures = outcome.figures
    return {
        "num_devices": outcome.layout.num_devices,
        "attainment": outcome.attainment,
        "ttft_s": figures.ttft_s.to_json(),
        "tpot_s": figures.tpot_s.to_json(),
    }


def words_of(group: Group, mode: str, kv_listen: str = "127.0.0.1:0") -> list[str]:
    """Words of `maitred serve` for one worker, but for the model."""
    words = ["--max-num-seqs", str(group.max_num_seqs), "--max-num-batched-tokens", str(group.token_budget)]
    count = group.candidate.target.num_devices
    words += ["--tensor-parallel", str(count)] if count > 1 else []
    return words if mode == "aggregated" else [*words, "--role", group.role.value, "--kv-listen", kv_listen]


def commands_of(outcome: LayoutFigures, options: PlanOptions) -> list[str]:
    """What starts it: replicas of one router, or servers on hosts of their own."""
    layout, model = outcome.layout, options.model or ""
    lines = [
        f"# {group.candidate.name}: maitred simulates expert parallelism and does not serve it"
        for group in layout.groups
        if group.candidate.name.endswith("ep")
    ]
    if layout.num_slices > 1:
        lines.append(f"# {layout.num_slices:,} times, each behind a router of its own:")
    if layout.mode == "aggregated":
        (group,) = layout.groups
        return [*lines, f"maitred route --replicas {group.count} -- {model} {' '.join(words_of(group, layout.mode))}"]
    for group in layout.groups:
        words = " ".join(words_of(group, layout.mode, "HOST:9100"))
        lines.append(f"maitred serve {model} {words} --fleet-token-file token   # on {group.count} hosts")
    slos = " ".join(f"--slo {slo}" for slo in options.slo if not slo.startswith("e2e"))
    return [*lines, f"maitred route http://HOST:8000 ... --fleet-token-file token --handover {layout.handover} {slos}"]


def report_of(planner: Planner, told: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of a report: the best plan of each mode side by side, and all layouts that met the objectives."""
    plan, front, by_rate = planner.plan, planner.front(), planner.wanted.rate is None
    outcomes = sorted(plan.best.values(), key=planner.score)
    notes = [] if outcomes else [_no_plan(planner).removeprefix("no plan: ")]
    notes += [_pays(planner)] * (plan.pays_from is not None)
    return {
        **told,
        "columns": [
            column(each["mode"], each, outcome.figures, tickets=outcome.tickets)
            for each, outcome in zip(told["plans"], outcomes, strict=True)
        ],
        "notes": [*notes, *["the search was cut: this is the best so far"] * plan.is_cut],
        "minimised": "requests/s" if by_rate else planner.wanted.minimise,
        "tried": [
            {**_brief(each), "x": each.rate if by_rate else planner.score(each)[0], "front": each in front}
            for each in plan.tried
        ],
    }


def _pays(planner: Planner) -> str:
    pays = planner.plan.pays_from or inf
    slowest = "at no speed of the link" if isinf(pays) else f"from a link of {pays / 1e9:.2g} GB/s on"
    return f"disaggregation pays {slowest}"


HEADINGS = (
    "mode",
    "devices",
    "req/s",
    "ttft p50",
    "p90",
    "tpot p50",
    "p90",
    "good",
    "tok/s/dev",
    "W/dev",
    "J/tok",
    "per M",
)


def text_of(planner: Planner, told: Mapping[str, Any]) -> str:
    plan = planner.plan
    blocks = []
    if plan.best:
        rows = [list(HEADINGS), *(_row(each) for each in told["plans"])]
        blocks.append(aligned(rows))
        blocks.append("\n".join(f"{each['mode']}: {each['layout']}" for each in told["plans"]))
        commands = "\n".join(f"  {line}" for line in told["plans"][0]["commands"])
        blocks.append(f"best: {told['best']}\n{commands}")
        front = [["devices", "req/s", "mean e2e", "layout"]]
        front += [
            [str(at["num_devices"]), f"{at['rate']:.4g}", seconds_text(at["mean_e2e_s"]), at["layout"]]
            for at in told["front"]
        ]
        blocks.append("\n".join(["no layout is better in both:", *("  " + "  ".join(row) for row in front)]))
    else:
        blocks.append(_no_plan(planner))
    if parts := told["slice_parts"]:
        blocks.append(_slices_text(parts))
    if plan.pays_from is not None:
        blocks.append(_pays(planner))
    if plan.rejected:
        lines = [f"  {count} x {reason}" for reason, count in plan.rejected.most_common()]
        blocks.append("\n".join(["rejected:", *lines]))
    return "\n\n".join(blocks)


def _slices_text(parts: list[dict[str, Any]]) -> str:
    """Figures of the simulated slice of a fleet and of its parts, in words."""
    rows = [["", "good", "ttft p90", "tpot p90"]]
    for part in parts:
        times = [seconds_text(part[name]["p90"]) for name in ("ttft_s", "tpot_s")]
        rows.append([f"{part['num_devices']} devices", f"{part['attainment']:.1%}", *times])
    (_, half, whole), names = parts, ("ttft", "tpot")
    p90s = [(name, half[f"{name}_s"]["p90"], whole[f"{name}_s"]["p90"]) for name in names]
    moved = ", ".join(f"{name} p90 {before / after - 1:+.0%}" for name, before, after in p90s if before and after)
    return (
        f"simulated was one slice; parts of it over the same time (a half beside the whole: {moved}):\n{aligned(rows)}"
    )


def _row(each: Mapping[str, Any]) -> list[str]:
    cost = each["cost_per_million_tokens"]
    return [
        each["mode"],
        str(each["num_devices"]),
        f"{each['rate']:.4g}",
        *(seconds_text(each[name][share]) for name in ("ttft_s", "tpot_s") for share in ("p50", "p90")),
        f"{each['attainment']:.1%}",
        f"{each['tokens_per_s_per_device']:,.0f}",
        f"{each['watts_per_device']:,.0f}",
        f"{each['joules_per_token']:.3g}",
        "-" if cost is None else f"{cost:.3g}",
    ]


def _no_plan(planner: Planner) -> str:
    """The objective that no layout meets, and the best value reached."""
    terms, nearest = planner.terms, planner.plan.nearest
    share = f"{terms.attainment:.0%} of the requests"
    for name, (value_s, what) in nearest.items():
        bound_s = getattr(terms.objectives, f"{name}_s", None)
        if bound_s is not None and value_s > bound_s:
            best = f"{seconds_text(value_s)} is the best, of {what}"
            return f"no plan: no layout meets {name}:{seconds_text(bound_s)} for {share}; {best}"
    reason = ", ".join(planner.plan.rejected) or "the search was cut before the first"
    return f"no plan: {reason}; name other devices, more of them (--parallel, --devices), or a lower --rate"
