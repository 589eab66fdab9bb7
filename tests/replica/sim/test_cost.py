"""What a step costs, by hand."""

from replica.sim.cost import SimConfig, StepCosts, StepWork


def test_a_step_is_counted_once_with_all_that_is_in_it() -> None:
    step = StepWork.of([(100, 300), (10, 10)], [500, 700])
    needed = 100 * 250 + 10 * 5 + 500 + 700
    assert (step.prompt, step.decoding, step.context, step.pairs) == (110, 2, 1510, needed)
    assert step.amounts == (0.0, 110, 1.0, 1, 1510, needed, 112 * 1510 - needed)


def test_a_step_without_decoding_has_a_cost_of_its_own() -> None:
    costs = StepCosts(step_s=3, prompt_s=1, decode_s=5, further_s=2, context_s=0, pair_s=0, dense_s=0)
    assert costs.seconds(StepWork.of([(4, 4)], ())) == 3 + 4
    assert costs.seconds(StepWork.of([(4, 4)], (9,))) == 5 + 4
    assert costs.seconds(StepWork.of((), (9, 9, 9))) == 5 + 2 * 2


def test_the_costs_of_a_configuration() -> None:
    config = SimConfig(
        prefill_rate=100, decode_rate=10, decode_slowdown=0.5, step_s=3, context_s=4, attention_s=6, attention_dense=0.25
    )
    assert config.costs == StepCosts(3, 0.01, 0.1, 0.05, 4, 6, 1.5)


def test_by_default_only_tokens_and_sequences_cost() -> None:
    config = SimConfig()
    assert config.costs.seconds(StepWork.of([(5000, 90_000)], ())) == 1
    assert config.costs.seconds(StepWork.of((), [9000] * 200)) == 1 / 50
