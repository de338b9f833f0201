"""Writes the Grafana dashboard: `python deploy/grafana/dashboard.py > deploy/grafana/maitred.json`.

A row a question, a panel a figure; the tables below are all there is to edit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, PANEL_HEIGHT, STAT_HEIGHT = 24, 8, 4
WHERE = '{instance=~"$instance"}'
IN_OBJECTIVE, ALL = "maitred_requests_in_objective_total", 'objective="all"'
KEYS = "maitred_fleet_prefix_keys_total"


class Panel(NamedTuple):
    title: str
    unit: str  # Grafana's name of it
    queries: Sequence[tuple[str, str]]  # (legend, PromQL)
    kind: str = "timeseries"
    help: str = ""


def rate(metric: str, by: str = "", only: str = "") -> str:
    """`only` are further matchers, such as met="true"."""
    where = f'{{{only}, instance=~"$instance"}}' if only else WHERE
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{where}[$__rate_interval]))"


def ratio(part: str, whole: str) -> str:
    return f"{rate(part)} / {rate(whole)}"


def grown(metric: str) -> str:
    return f"sum(increase({metric}{WHERE}[$__rate_interval]))"


def quantiles(metric: str) -> list[tuple[str, str]]:
    return [
        (f"p{q}", f"histogram_quantile(0.{q}, sum by (le) (rate({metric}_bucket{WHERE}[$__rate_interval])))")
        for q in (50, 90, 99)
    ]


def total(metric: str) -> str:
    return f"sum({metric}{WHERE})"


def in_objective(by: str, only: str) -> str:
    """Share of requests that met their objective."""
    met, all_of_them = (rate(IN_OBJECTIVE, by, f"{only}{also}") for also in (', met="true"', ""))
    return f"{met} / {all_of_them}"


ROWS: dict[str, Sequence[Panel]] = {
    "Now": (
        Panel("Engines up", "none", [("", total("maitred_engine_up"))], "stat"),
        Panel("Running", "none", [("", total("maitred_requests_running"))], "stat"),
        Panel("Waiting", "none", [("", total("maitred_requests_waiting"))], "stat"),
        Panel("KV cache in use", "percentunit", [("", f"avg(maitred_kv_usage_ratio{WHERE})")], "stat"),
        Panel("Tokens generated", "tokens/s", [("", rate("maitred_generation_tokens_total"))], "stat"),
        Panel("Refused", "reqps", [("", rate("maitred_admission_refused_total"))], "stat"),
    ),
    "How long do people wait?": (
        Panel("Time to first token", "s", quantiles("maitred_request_ttft_seconds")),
        Panel("Time between tokens", "s", quantiles("maitred_request_inter_token_latency_seconds")),
        Panel("Whole answer", "s", quantiles("maitred_request_e2e_seconds")),
    ),
    "Are promises kept? (--slo)": (
        Panel(
            "Goodput",
            "reqps",
            [
                ("met", rate(IN_OBJECTIVE, only=f'{ALL}, met="true"')),
                ("not met", rate(IN_OBJECTIVE, only=f'{ALL}, met="false"')),
            ],
            help="Requests that met all their objectives, and those that did not.",
        ),
        Panel("Met, by objective", "percentunit", [("{{objective}}", in_objective("objective", 'objective!=""'))]),
        Panel("Met, by tenant", "percentunit", [("{{tenant}}", in_objective("tenant", ALL))]),
    ),
    "Where does the time go?": (
        Panel("In the queue", "s", quantiles("maitred_request_queue_seconds")),
        Panel("Prefill", "s", quantiles("maitred_request_prefill_seconds")),
        Panel("Decode", "s", quantiles("maitred_request_decode_seconds")),
    ),
    "Who is served?": (
        Panel("Running and waiting", "none", [
            ("running", total("maitred_requests_running")), ("waiting", total("maitred_requests_waiting"))
        ]),
        Panel("Answers by reason", "reqps", [("{{reason}}", rate("maitred_requests_finished_total", "reason"))]),
        Panel("HTTP by status", "reqps", [("{{status}}", rate("maitred_http_requests_total", "status"))]),
    ),
    "The engine": (
        Panel("Tokens", "tokens/s", [
            ("generated", rate("maitred_generation_tokens_total")),
            ("prompt", rate("maitred_prompt_tokens_total")),
            ("computed", rate("maitred_scheduled_tokens_total")),
        ]),
        Panel(
            "A step",
            "s",
            [
                ("executor", ratio("maitred_engine_execute_seconds_total", "maitred_engine_steps_total")),
                ("host", ratio("maitred_engine_host_seconds_total", "maitred_engine_steps_total")),
            ],
            help="Mean time of a step in the executor and outside it.",
        ),
        Panel("Since the last step", "s", [("{{instance}}", f"maitred_engine_last_step_age_seconds{WHERE}")]),
    ),
    "Does it stay up?": (
        Panel(
            "Engine restarts",
            "none",
            [("restarts", grown("maitred_engine_restarts_total"))],
            help="Times the engine's process died and was started again; the server's log has each cause in one line.",
        ),
        Panel("Requests that went on with another engine", "none", [("", grown("maitred_requests_resumed_total"))]),
        Panel("Since the last heartbeat", "s", [("{{instance}}", f"maitred_engine_heartbeat_age_seconds{WHERE}")]),
        Panel("What the start took", "s", [("{{phase}}", f"max by (phase) (maitred_start_seconds{WHERE})")]),
    ),
    "Memory": (
        Panel("KV blocks", "none", [
            ("capacity", total("maitred_kv_blocks_capacity")),
            ("used", total("maitred_kv_blocks_used")),
            ("cached", total("maitred_kv_blocks_cached")),
        ]),
        Panel("Prefix cache hits", "percentunit", [
            ("hit", ratio("maitred_prefix_cache_hit_tokens_total", "maitred_prefix_cache_queried_tokens_total"))
        ]),
        Panel("Preemptions and swaps", "ops", [
            ("preemptions", rate("maitred_preemptions_total")),
            ("blocks out", rate("maitred_swapped_out_blocks_total")),
            ("blocks in", rate("maitred_swapped_in_blocks_total")),
        ]),
    ),
    "Admission": (
        Panel("Refused, by reason", "reqps", [("{{reason}}", rate("maitred_admission_refused_total", "reason"))]),
        Panel("Wait foretold to the next", "s", [("{{instance}}", f"maitred_admission_wait_seconds{WHERE}")]),
        Panel("Let in, without a first token", "none", [("", total("maitred_admission_waiting_requests"))]),
    ),
    "Tenants": (
        Panel("Tokens by tenant", "tokens/s", [("{{tenant}}", rate("maitred_tenant_tokens_total", "tenant"))]),
        Panel("Refusals by tenant and limit", "reqps", [
            ("{{tenant}} {{limit}}", rate("maitred_tenant_refusals_total", "tenant, limit"))
        ]),
        Panel("In flight by tenant", "none", [
            ("{{tenant}}", f"sum by (tenant) (maitred_tenant_samples_in_flight{WHERE})")
        ]),
    ),
    "The fleet: who is there?": (
        Panel("Replicas", "none", [("{{state}}", f"sum by (state) (maitred_fleet_replicas{WHERE})")]),
        Panel("Requests by replica", "reqps", [
            ("{{replica}} {{outcome}}", rate("maitred_fleet_requests_total", "replica, outcome"))
        ]),
        Panel("Attempts, and answers that went on elsewhere", "reqps", [
            ("{{outcome}}", rate("maitred_fleet_attempts_total", "outcome")),
            ("resumed", rate("maitred_fleet_resumes_total")),
        ]),
        Panel("New and reused connections to replicas", "reqps", [
            ("{{kind}}", rate("maitred_fleet_upstream_connections_total", "kind"))
        ]),
    ),
    "The fleet: who waits, and where do requests go?": (
        Panel("Held at the router", "none", [("held", total("maitred_fleet_held_requests"))]),
        Panel("Wait for a replica", "s", [
            *quantiles("maitred_fleet_queue_wait_seconds"),
            ("oldest", f"max(maitred_fleet_oldest_held_seconds{WHERE})"),
        ]),
        Panel("Prefix keys thought to be there", "percentunit", [
            ("hit", rate(KEYS, only='outcome="hit"') + " / " + rate(KEYS))
        ]),
        Panel(
            "Busiest replica beside the mean",
            "none",
            [("{{instance}}", f"maitred_fleet_load_ratio{WHERE}")],
            help="Requests in flight; --max-load-ratio bounds it, plus one.",
        ),
    ),
}  # fmt: skip


def dashboard() -> dict[str, object]:
    panels: list[dict[str, object]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y}, "panels": []})
        height = STAT_HEIGHT if row[0].kind == "stat" else PANEL_HEIGHT
        width = WIDTH // len(row)
        panels += [_panel(panel, i * width, y + 1, width, height) for i, panel in enumerate(row)]
        y += 1 + height
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    return {
        "uid": "maitred",
        "title": "maitred",
        "tags": ["llm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": panels,
    }


def _variables() -> Iterable[dict[str, object]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    yield {
        "name": "instance",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(maitred_http_requests_in_flight, instance)", "refId": "instance"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, x: int, y: int, width: int, height: int) -> dict[str, object]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend or "__auto", "datasource": DATASOURCE}
        for i, (legend, expr) in enumerate(panel.queries)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": {"h": height, "w": width, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


if __name__ == "__main__":
    json.dump(dashboard(), sys.stdout, indent=1)
    sys.stdout.write("\n")
