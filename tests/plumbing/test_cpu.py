"""What makes a CPU fast: other layouts of the weights, beside the caller's; threads by load."""

import copy
import gc
import pickle
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from commands import MARS, PROMPT, command, process
from common import ROOT, cases, endless_model, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn

import decode
from decode import Decoder, Options, generate
from plumbing import cpu

DTYPES = [torch.float32, torch.bfloat16]
needs_bfloat16 = pytest.mark.skipif(not cpu.can_pack(), reason="oneDNN has no bfloat16 on this CPU")

# ---------------------------------------------------------------------------------- the fast copy


def tiny(seed: int, dtype: torch.dtype, is_tied=False):
    """Random weights of one shape, with matrices that are tall."""
    rng = random.Random(3)
    model = tiny_model(rng, vocab_size=64)
    while model.config.tie_word_embeddings != is_tied:
        model = tiny_model(rng, vocab_size=64)
    torch.manual_seed(seed)
    for weight in model.parameters():
        weight.data.normal_(0.3, 0.7)
    return model.to(dtype).requires_grad_(False)


def answers(model) -> list[list[int]]:
    return [result.tokens for result in generate(model, [[2, 3], [4] * 9], tau=0.2, max_new=12)]


@torch.inference_mode()
def outputs(model, T: int = 5) -> torch.Tensor:
    tokens = 3 + torch.arange(T)[None]
    hidden = model(tokens, torch.arange(T)[None], None)
    return model.logits_at(hidden, torch.arange(T)[None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_fast_copy_is_the_same_model(dtype, is_tied):
    """For any number of positions; it shares with the model what is not a matrix of a product."""
    model = tiny(0, dtype, is_tied)
    fast = cpu.fast_copy(model)
    for T in (1, 2, 9, 25, 60):
        found, expected = outputs(fast, T), outputs(model, T)
        seen = expected > float("-inf")
        assert torch.equal(seen, found > float("-inf"))
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        assert (found - expected)[seen].abs().max() < tolerance * expected[seen].abs().max()
    assert all(map(lambda one, other: one is other, fast.parameters(), model.parameters()))
    assert fast.config is model.config


def test_there_is_a_copy_only_where_it_is_of_use(monkeypatch):
    model = tiny(0, torch.float32)
    assert cpu.fast_copy(model) is not model
    assert cpu.fast_copy(model.double()) is model
    monkeypatch.setattr(cpu, "can_pack", lambda: False)
    assert cpu.fast_copy(model.bfloat16()) is model


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_leaves_the_callers_model_alone(dtype, tmp_path):
    """Its weights were stored in another order, and its products were replaced by packed ones.

    So save_file failed ("non contiguous"), and deepcopy, pickle and .to led to obscure exceptions.
    """
    model = tiny(0, dtype)
    plain = outputs(model)
    strides = [weight.stride() for weight in model.parameters()]
    attributes = [set(vars(module)) for module in model.modules()]
    expected = answers(model)
    assert [weight.stride() for weight in model.parameters()] == strides
    assert all(weight.is_contiguous() for weight in model.parameters())
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(outputs(model), plain)

    save_file(model.state_dict(), tmp_path / "x.safetensors")
    saved = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in model.state_dict().items())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to(dtype)):
        assert answers(copied) == expected and torch.equal(outputs(copied), plain)
    assert len(answers(model.double())) == 2 and model.dtype == torch.float64


def load_others(model, other):
    model.load_state_dict(other.state_dict())


def edit_in_place(model, other):
    with torch.no_grad():
        for weight, new in zip(model.parameters(), other.parameters()):
            weight.copy_(new)


def replace_parameters(model, other):
    for module, new in zip(model.modules(), other.modules()):
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(new.weight.clone())


def take_a_step(model, other):
    model.requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    model(torch.tensor([[2, 3]]), torch.arange(2)[None], None).sum().backward()
    optimizer.step()
    model.requires_grad_(False)


def assign_others(model, other):
    model.load_state_dict(other.state_dict(), assign=True)


CHANGES = [load_others, edit_in_place, replace_parameters, take_a_step, assign_others]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_next_answer_is_of_the_weights_as_they_are_then(change, dtype):
    """In bfloat16 it was of the old weights, without a word. (torch does not count the steps of a
    fused optimizer, such as train.py's, among the changes of a weight.)"""
    for seed in cases(4, 40):
        model = tiny(seed, dtype)
        decoder = Decoder(model, Options(tau=0.2, max_new=12), rows=1, longest=21)
        decoder.add([2, 3])
        list(decoder)
        before = answers(model)
        plain = outputs(model)
        change(model, tiny(99 + seed, dtype))
        fresh = copy.deepcopy(model)
        assert not torch.allclose(outputs(model), plain)
        assert answers(model) == answers(fresh)
        assert torch.equal(outputs(cpu.fast_copy(model)), outputs(cpu.fast_copy(fresh)))
        sequence = decoder.add([4] * 9)  # the next prompt of a decoder that is still there
        list(decoder)
        assert sequence.tokens == answers(fresh)[1]
        if answers(model) != before:
            return
    pytest.fail("no change changed the answer")


def test_new_weights_are_not_where_the_old_ones_were():
    """Rounded to bfloat16 and back, they were sometimes, and so were taken for the old ones."""
    model = tiny(0, torch.float32)
    for _ in range(20):
        cpu.fast_copy(model)
        before = {weight.data_ptr() for weight in model.parameters()}
        model.to(torch.bfloat16).to(torch.float32)
        assert before.isdisjoint(weight.data_ptr() for weight in model.parameters())


@pytest.mark.parametrize("is_frozen", [False, True])
def test_training_goes_on_as_if_nothing_had_been_decoded(is_frozen):
    """AdamW pairs weights and moments by their place in memory. To decode in the middle, the model
    frozen meanwhile, changed the layout under it: 60.55 where 59.09 was right."""
    weights = []
    for decodes in (False, True):
        model = tiny(0, torch.float32).requires_grad_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            tokens = torch.tensor([[2, 3, 4, 5]])
            model(tokens, torch.arange(4)[None], None).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if decodes:
                model.requires_grad_(not is_frozen)
                answers(model)
                model.requires_grad_()
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_is_copied_once(dtype, monkeypatch):
    """Every conversation and every call of generate makes a decoder, and prefills many times."""
    if dtype == torch.bfloat16 and not cpu.can_pack():
        pytest.skip("needs no copy")
    copied = []
    make_copy = cpu.make_copy

    def counted(model):
        copied.append(model)
        return make_copy(model)

    monkeypatch.setattr(cpu, "make_copy", counted)
    model, other = tiny(0, dtype), tiny(1, dtype)
    for _ in range(3):
        answers(model)
        answers(other)
    assert copied == [model, other]
    load_others(model, other)
    answers(model)
    answers(model)
    assert copied == [model, other, model]


def test_a_copy_ends_with_its_model():
    model = tiny(0, torch.float32)
    fast = weakref.ref(cpu.fast_copy(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and fast() is None


def test_a_model_made_in_inference_mode():
    """Such weights have no version to ask for."""
    with torch.inference_mode():
        model = tiny(0, torch.float32)
        assert answers(model) == answers(model)


def test_bfloat16_on_an_older_cpu():
    """oneDNN has no bfloat16 before AVX-512: packing ended in a traceback."""
    words = ("decode.py", *MARS, "--dtype", "bfloat16", "--device", "cpu", "--verify")
    done = process(*words, "--prompt", PROMPT, ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.status == 0 and "The answer is 43." in done.out, done.err


@needs_bfloat16
@torch.inference_mode()
def test_in_bfloat16_a_single_position_is_rounded_like_two():
    """It had another kernel: at one row a third of SmolLM2's lossless answers were not those of
    tau 1. (On CPUs where it has not, it is not computed twice. One random position once decided
    that; it shows the difference in one case of five.)"""
    torch.manual_seed(0)
    for shape in [(1536, 576), (576, 1536), (192, 576), (2000, 576)] * 2:
        product = cpu.PackedProduct(torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16())
        for x in torch.randn(40, 1, 2, shape[1]).bfloat16():
            expected = product(x)
            assert torch.equal(product(x[:, :1]), expected[:, :1])
            assert torch.equal(product(x[0, :1]), expected[0, :1])  # the head's are 2-D


# ---------------------------------------------------------------------------------------- threads

USED_10_SECONDS = "cpu  500 100 300 70000 40 60 40 9 0 0\ncpu0 250 50 150 35000 20 30 20 4 0 0\n"


class FakeStat:
    """Stands for /proc/stat."""

    def __init__(self, state: dict):
        self.state = state

    def exists(self) -> bool:
        return True

    def read_text(self) -> str:
        ticks = round((self.state["others"] + self.state["own"]) * cpu.os.sysconf("SC_CLK_TCK"))
        return f"cpu  {ticks} 0 0 70000 0 0 0 0 0 0\n"


@pytest.fixture
def machine(monkeypatch):
    """Four cores, and a clock that stands still."""
    state = {"now": 100.0, "others": 10.0, "own": 1.0, "threads": 4}
    monkeypatch.setattr(cpu, "CHOSEN_BY_USER", False)
    monkeypatch.setattr(cpu, "STAT", FakeStat(state))
    monkeypatch.setattr(cpu.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(cpu.time, "monotonic", lambda: state["now"])
    monkeypatch.setattr(cpu.time, "process_time", lambda: state["own"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: state.update(threads=n))
    return state


def pass_time(state: dict, seconds: float, others: float, own: float = 0.0) -> None:
    """With that much work of other programs, and of this one."""
    state["now"] += seconds
    state["others"] += others
    state["own"] += own


def test_used_adds_up_work_but_not_idleness():
    ticks = cpu.os.sysconf("SC_CLK_TCK")
    assert cpu.seconds_used(USED_10_SECONDS) * ticks == 500 + 100 + 300 + 60 + 40


def test_busy_neighbours_take_threads_away_and_give_them_back(machine):
    """The bug: with one busy neighbour decoding was 3 to 40 times slower, training 9 times."""
    cores = cpu.FreeCores()
    for busy_cores, expected in [(0, 4), (1, 3), (0.5, 3), (0.2, 4), (2, 2), (9, 1), (0, 4)]:
        pass_time(machine, 1.0, others=busy_cores, own=3.0)
        cores.look()
        assert machine["threads"] == expected, busy_cores


def test_looks_only_now_and_then(machine):
    cores = cpu.FreeCores()
    pass_time(machine, 0.1, others=0.1)
    cores.look()
    assert machine["threads"] == 4
    pass_time(machine, 0.2, others=0.2)
    cores.look()
    assert machine["threads"] == 3


def threads_in_a_forward(machine, model) -> int:
    """A second later, in which other programs had all cores."""
    pass_time(machine, 1.0, others=4.0)
    generate(model, [[2, 3]], tau=1, max_new=2)
    return machine["threads"]


def test_threads_are_chosen_for_models_that_ask_for_it(machine, monkeypatch):
    """One line in a main. What the user or the program around us set stays; a program that imports
    us keeps its threads."""
    assert threads_in_a_forward(machine, endless_model()) == 4
    model = endless_model()
    monkeypatch.setattr(cpu, "CHOSEN_BY_USER", True)
    cpu.use_free_cores(model)
    assert threads_in_a_forward(machine, model) == 4
    monkeypatch.setattr(cpu, "CHOSEN_BY_USER", False)
    cpu.use_free_cores(model)
    assert threads_in_a_forward(machine, model) == 1
    machine["threads"] = 2
    assert threads_in_a_forward(machine, model) == 2


def test_every_forward_looks(machine, monkeypatch, tmp_path):
    """Once training looked at the beginning of a step only, and a step may take a minute."""
    looks = []
    monkeypatch.setattr(cpu.FreeCores, "look", lambda self: looks.append(self))
    for dtype in (torch.float64, *DTYPES):
        model = endless_model().to(dtype)
        cpu.use_free_cores(model)
        [result] = generate(model, [[3, 4, 5]], tau=1, max_new=7)
        assert len(looks) == result.forwards == 7
        looks.clear()
    done = command("decode", *MARS, "--prompt", PROMPT, "--verify")
    assert done.status == 0 and f"in {len(looks)} forwards" in done.err
    looks.clear()
    words = ["--model", ROOT / "toy/sft", "--data", ROOT / "toy/test.jsonl"]
    words += ["--out", tmp_path / "out", "--steps", 3, "--batch", 4, "--held-out", 0]
    assert command("train", *words, "--batch-tokens", 1).status == 0  # an example per forward
    assert len(looks) == 3 * 4


@pytest.mark.parametrize("compile", [False, True])
def test_a_compiled_model_keeps_its_threads(monkeypatch, compile):
    """Or each number of threads would be compiled anew."""
    asked = []
    monkeypatch.setattr(decode, "use_free_cores", asked.append)
    args = SimpleNamespace(device="cpu", dtype=None, model=str(MARS[1]), compile=compile)
    args.template_option = []
    model, _ = decode.load_for_decoding(args)
    assert asked == ([] if compile else [model])
