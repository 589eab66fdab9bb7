"""Metrics of the feature `workflows`, as its declaration names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.telemetry.counters import merge_sum
from gateway.telemetry.metrics import MetricFamily

if TYPE_CHECKING:
    from gateway.features.workflows.running.run import WorkflowRun


class WorkflowsMetrics:
    """Runs of workflows, and their tokens beside the least possible."""

    def __init__(self, make: MetricFamily) -> None:
        self.runs = make.counter(
            "workflow_runs_total",
            "Runs by their workflow (of the directory; others: tenant, inline), and how they ended: completed, failed,"
            " cancelled, incomplete.",
            "workflow",
            "status",
        )
        self.seconds = make.seconds("workflow_run", "Seconds from the start of a run to its end.", "workflow")
        self.steps = make.counter("workflow_steps_total", "Steps of ended runs, by kind and status.", "kind", "status")
        self.retries = make.counter(
            "workflow_retries_total",
            "Repeated attempts of steps, by the failure before: server_error, rate_limit, timeout, broken_answer,"
            " constraint_unsatisfied, connector_failed.",
            "reason",
        )
        self.wasted = make.counter("workflow_wasted_tokens_total", "Tokens of answers that are in no result.")
        self.computed = make.counter("workflow_computed_tokens_total", "Prompt tokens that engines computed for runs.")
        self.least = make.counter("workflow_least_tokens_total", "The least that any order of the same calls computes.")
        self.gate = make.seconds("workflow_gate", "Seconds that steps waited for a step that computed their prefix.")
        self.adoptions = make.counter(
            "workflow_adoptions_total",
            "Runs in the background of another gateway that went on here, because it handed them over (handed_over) or was"
            " silent (silent).",
            "reason",
        )
        self.running = make.gauge("workflow_running", "Runs at this moment.", merge_rule=merge_sum)

    def count_run(self, run: WorkflowRun, seconds: float) -> None:
        """A run has ended."""
        name, usage = run.counted_as, run.usage
        self.runs.add((name, run.scheduler.status))
        self.seconds.observe((name,), seconds)
        self.wasted.add((), usage["wasted_tokens"])
        self.computed.add((), usage["computed_tokens"])
        self.least.add((), usage["least_tokens"])
        for reason, repeats in run.scheduler.repeats.items():
            self.retries.add((reason,), repeats)
        for one in run.scheduler.tree.all():
            self.steps.add((one.step.work.kind, one.result.status))
            if one.gated >= 0 and one.started >= 0:
                self.gate.observe((), one.started - one.gated)
