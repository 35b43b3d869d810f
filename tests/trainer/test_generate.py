"""Generation continues a run's own model, whatever its layout, and a prompt never sees its neighbours."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_titan.cli import main
from jax_titan.models.unit import logits
from jax_titan.trainer.generate import Generator
from jax_titan.trainer.sampling import Sampling

TINY = (
    "train llama3-debug --model.layers 2 --model.dim 16 --model.heads 2 --model.kv_heads 1 --model.ffn_dim 24 "
    "--data.tokenizer bytes --train.sequence_length 32 --train.batch 8 --train.microbatches 2 --train.steps 3 "
    "--eval.batches 1 --checkpoint.every 2 --model.init_std 0.4"
).split()
PROMPTS = ["Call me", "", "The whale was of an extraordinary length and", "é"]


@pytest.fixture(
    scope="module", params=["--pipeline.stages 3 --model.tied true", "--parallel.layout spmd --parallel.fsdp 2"]
)
def run(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("generate") / "run"
    assert main([*TINY, *request.param.split(), "--run.dir", str(directory)]) == 0
    return directory


def texts(generator, prompts, **options):
    rows = [[] for _ in prompts]
    for drawn in generator.stream(prompts, Sampling(**options)):
        for row, token in zip(rows, drawn, strict=True):
            if token is not None:
                row.append(token)
    return rows


def test_greedy_tokens_are_those_of_full_forwards_without_a_cache(run):
    generator = Generator.of_run(run)
    for prompt, found in zip(PROMPTS, texts(generator, PROMPTS, temperature=0.0, tokens=40), strict=True):
        row = [generator.tokenizer.bos, *generator.tokenizer.encode(prompt)]
        start = len(row)
        for token in found:
            tokens = np.array([row], np.int32)
            batch = {
                "tokens": jnp.asarray(tokens),
                "positions": jnp.arange(len(row))[None],
                "segments": jnp.ones_like(tokens),
            }
            expected = logits(generator.model.units, generator.params, batch)[0, -1]
            assert int(np.argmax(expected)) == token, (prompt, len(row) - start)
            row.append(token)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 3}]
)
def test_a_batch_of_prompts_gives_each_what_it_gets_alone(run, options):
    generator = Generator.of_run(run)
    together = texts(generator, PROMPTS, tokens=20, **options)
    for prompt, row in zip(PROMPTS, together, strict=True):
        assert texts(generator, [prompt], tokens=20, **options) == [row]
    assert texts(generator, PROMPTS[::-1], tokens=20, **options) == together[::-1]


def test_the_likeliest_alone_is_left_by_a_top_k_of_one_and_by_a_small_top_p(run):
    generator = Generator.of_run(run)
    greedy = texts(generator, PROMPTS, temperature=0.0, tokens=12)
    assert texts(generator, PROMPTS, top_k=1, tokens=12) == greedy
    assert texts(generator, PROMPTS, top_p=1e-6, tokens=12) == greedy
    assert texts(generator, PROMPTS, temperature=1.0, tokens=12) != greedy
    seeds = {str(texts(generator, PROMPTS, temperature=1.0, tokens=12, seed=seed)) for seed in range(3)}
    assert len(seeds) == 3


def test_draws_have_the_probabilities_of_the_logits():
    wanted = np.array([0.5, 0.3, 0.15, 0.05])
    keys = jax.random.split(jax.random.key(0), 4000)

    def frequencies(**options):
        draw = Sampling(**options).draw
        tokens = jax.vmap(lambda key: draw(key, np.log(wanted), 0))(keys)
        return np.bincount(np.asarray(tokens), minlength=4) / len(keys)

    np.testing.assert_allclose(frequencies(temperature=1.0), wanted, atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=0.5), wanted**2 / (wanted**2).sum(), atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=1.0, top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=1.0, top_p=0.79), [0.625, 0.375, 0, 0], atol=0.03)
    assert frequencies(temperature=1.0, top_p=0.81)[2] > 0


def test_an_earlier_checkpoint_can_be_asked(run):
    assert (Generator.of_run(run).step, Generator.of_run(run, 2).step) == (3, 2)


def test_the_command_streams_one_prompt_and_lists_several(run, capsys):
    assert main(["generate", str(run), "--prompt", "Call me", "--tokens", "8", "--temperature", "0"]) == 0
    alone = capsys.readouterr().out
    assert alone.startswith("Call me")
    flags = ["--prompt", "Call me", "--prompt=x", "--tokens", "8", "--temperature", "0", "--json"]
    assert main(["generate", str(run), *flags]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [answer["prompt"] for answer in answers] == ["Call me", "x"]
    assert answers[0]["prompt"] + answers[0]["text"] + "\n" == alone


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--temprature 1", "generate: '--temprature' is unknown; did you mean temperature?"),
        ("--temperature x", "generate: --temperature: 'x' is not a number"),
        ("--temperature -1", "generate: --temperature: -1.0 is not a temperature; use 0 or more"),
        ("--top_k -1", "generate: --top_k: -1 is too small; use 0 (all tokens) or more"),
        ("--top-p 0", "generate: --top_p: 0.0 is not in (0, 1]; use 1 for all tokens"),
        ("--tokens 0", "generate: --tokens: 0 is out of range; use 1 to 1048576"),
        ("--seed -1", f"generate: --seed: -1 is out of range; use 0 to {2**32 - 1}"),
        ("--prompt", "generate: --prompt: the value is missing"),
        ("--step 77", "77: there is no such checkpoint; committed steps: 2, 3"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(run, flags, problem, capsys):
    assert main(["generate", str(run), *flags.split()]) == 2
    captured = capsys.readouterr()
    assert problem in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_what_is_no_run_is_named(tmp_path, capsys):
    assert main(["generate", str(tmp_path / "nowhere")]) == 2
    assert "it holds no run; name the directory of a run" in capsys.readouterr().err
    assert main(["generate"]) == 2
    assert "generate: name a run directory first" in capsys.readouterr().err
