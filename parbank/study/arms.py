"""Changes that were published: functions Config -> Config. A docstring says what is claimed, where, and the number.

Numbers are bits per byte, below zero is better, on the track of parameter-golf: 8 H100s, 600 s, FineWeb, unless the
docstring says otherwise. The recipes `golf` and `sprint` already have some of these changes; the arm then takes the
change out.
"""

from collections.abc import Callable
from dataclasses import replace

from parbank.config import override
from parbank.training.config import RunConfig

Change = Callable[[RunConfig], RunConfig]
ARMS: dict[str, Change] = {}


def arm(function: Change) -> Change:
    """Registers an arm under the function's name, with dashes."""
    ARMS[function.__name__.replace("_", "-")] = function
    return function


@arm
def xsa_everywhere(config: RunConfig) -> RunConfig:
    """Exclusive attention in all layers, not the last few: +0.014 early (parameter-golf #670), -0.0018 (#1125)."""
    return override(config, "model.xsa_layers=-1")


@arm
def no_xsa(config: RunConfig) -> RunConfig:
    """Without exclusive attention, which the recipe of #549 has in its last 4 layers; no number of its own."""
    return override(config, "model.xsa_layers=0")


@arm
def value_residual(config: RunConfig) -> RunConfig:
    """Every layer's values are mixed with the first layer's: +0.0008 (parameter-golf #670), -0.0010 (#1859)."""
    return override(config, "model.value_residual=true")


@arm
def gated_attention(config: RunConfig) -> RunConfig:
    """A gate on each head's output: +0.0026 (parameter-golf #670), -0.0010 (#1859), -0.0035 (#1667, another form)."""
    return override(config, "model.gated_attention=true")


@arm
def weight_decay_008(config: RunConfig) -> RunConfig:
    """Weight decay 0.08 on matrices, not 0.04: +0.008 (parameter-golf #670); #1218 gains with 0.085 to 0.095."""
    return override(config, "optim.matrix_weight_decay=0.08")


@arm
def batch_third_larger(config: RunConfig) -> RunConfig:
    """A batch of 1,048,576 tokens, not 786,432: +0.003 (parameter-golf #670). A third more of any recipe's batch."""
    batch = config.batch
    return replace(config, batch=replace(batch, batch_tokens=batch.sequences * 4 // 3 * batch.sequence_length))


@arm
def width_576(config: RunConfig) -> RunConfig:
    """Width 576, not 512, with 9 heads of 64: a loss without a number (parameter-golf #686); +0.006 where int5 made it fit the
    cap (#670), which needs --packed and quant.matrix_bits=5."""
    return override(config, "model.width=576", *_heads(config, 576))


@arm
def swa(config: RunConfig) -> RunConfig:
    """The plain mean of the tail's weights is scored, not the EMA, which was better by 0.003 (parameter-golf #375)."""
    return override(config, "average.use=swa", "average.swa_every=1")


@arm
def no_average(config: RunConfig) -> RunConfig:
    """The last weights are scored, not an average of them; no number."""
    return override(config, "average.use=none")


@arm
def relu_squared(config: RunConfig) -> RunConfig:
    """ReLU^2 in place of LeakyReLU(0.5)^2, which gained -0.003 (parameter-golf #549), -0.0024 (#1859), -0.0015 (#535)."""
    return override(config, "model.activation=relu_squared")


@arm
def no_softcap(config: RunConfig) -> RunConfig:
    """Logits without tanh softcap 30, which modded-nanogpt took from Gemma 2; no number of its own."""
    return override(config, "model.softcap=0")


@arm
def full_rope(config: RunConfig) -> RunConfig:
    """RoPE on all channels of a head, not on a quarter; partial RoPE and norm scale gained -0.0023 (parameter-golf #315)."""
    return override(config, f"model.rope_dims={config.model.head_width}")


@arm
def contiguous_order(config: RunConfig) -> RunConfig:
    """Windows in the order of the text, not shuffled: 2.396 against 2.092 on a CPU (docs/log/cpu.md)."""
    return override(config, "batch.order=contiguous")


@arm
def hard_first(config: RunConfig) -> RunConfig:
    """The hardest parts of the text first: -0.003 with shards by a model's loss (parameter-golf #650), no gain (#772)."""
    return override(config, "batch.order=hard_first")


@arm
def vocab_4096(config: RunConfig) -> RunConfig:
    """A vocabulary of 4,096 tokens: every record of the track since April has 4,096 or more."""
    return override(config, "model.vocab_size=4096")


@arm
def case_operators(config: RunConfig) -> RunConfig:
    """Capitals as operators of the tokenizer: -0.0041 together with a decay taper (parameter-golf #1729)."""
    return override(config, "tokenizer.case_operators=true")


@arm
def vocab_8192(config: RunConfig) -> RunConfig:
    """A vocabulary of 8,192 tokens: 1.2667 -> 1.2073 in a run short of compute (parameter-golf #2005)."""
    return override(config, "model.vocab_size=8192")


@arm
def small_batch(config: RunConfig) -> RunConfig:
    """Two thirds of the batch, and more steps: -0.0119 by a smaller batch (autoresearch #44)."""
    batch = config.batch
    tokens = batch.sequences * 2 // 3 * batch.sequence_length
    together = tokens if tokens <= 2 * batch.micro_batch_tokens else batch.micro_batch_tokens
    return replace(config, batch=replace(batch, batch_tokens=tokens, micro_batch_tokens=together))


@arm
def long_warmdown(config: RunConfig) -> RunConfig:
    """The learning rate falls over the last 75% of the budget: -0.0006 (autoresearch)."""
    return override(config, "optim.warmdown=0.75")


@arm
def qk_gain_4(config: RunConfig) -> RunConfig:
    """The gain after the QK norm starts at 4, not 1.5: -0.0039 (parameter-golf #1125); 5 was +0.035 in a short run."""
    return override(config, "model.qk_gain=4.0")


@arm
def head_128(config: RunConfig) -> RunConfig:
    """Heads of 128 channels, half as many: attention runs at a higher rate (docs/log/training.md)."""
    heads = config.model.width // 128
    return override(config, f"model.heads={heads}", f"model.kv_heads={max(1, heads // 2)}")


@arm
def dropout_01(config: RunConfig) -> RunConfig:
    """A tenth of the outputs of attention and MLP dropped, for text that is seen several times; no number of its own."""
    return override(config, "train.dropout=0.1")


@arm
def bigrams_16384(config: RunConfig) -> RunConfig:
    """A bigram table of 16,384 rows, not 1,536: bytes and no arithmetic. 9.3% fewer steps (modded-nanogpt #201)."""
    return override(config, "model.bigram_buckets=16384")


@arm
def values_everywhere(config: RunConfig) -> RunConfig:
    """The value embedding in every second layer, not in the last two: modded-nanogpt #299, no number here."""
    layers = config.model.layers
    return override(config, f"model.value_layers={list(range(1, layers, 2))}")


@arm
def lr_floor(config: RunConfig) -> RunConfig:
    """The learning rate ends at 5% of its peak, not at zero: -0.0006 (autoresearch)."""
    return override(config, "optim.final_lr=0.05")


@arm
def embedding_lr_twice(config: RunConfig) -> RunConfig:
    """Twice the learning rate of embeddings: -0.0033 by a change of it (autoresearch)."""
    return override(config, f"optim.embedding_lr={2 * config.optim.embedding_lr}")


@arm
def mlp_4x(config: RunConfig) -> RunConfig:
    """An MLP of 4 times the width, with weight decay 0.09: -0.003 together (parameter-golf #1218)."""
    return override(config, "model.mlp_multiple=4.0", "optim.matrix_weight_decay=0.09")


@arm
def short_sequences_first(config: RunConfig) -> RunConfig:
    """Half the sequence for the first 40% of the budget: attention takes less time there (docs/log/training.md)."""
    batch = config.batch
    return replace(config, batch=replace(batch, stages=((0.4, batch.sequence_length // 2, batch.batch_tokens),)))


@arm
def mixed_lengths(config: RunConfig) -> RunConfig:
    """Half of a step's windows at half the sequence length, over ranks or passes; no number of its own."""
    length = config.batch.sequence_length
    return override(config, f"batch.mixed_lengths=[{length // 2},{length}]")


@arm
def quick_momentum(config: RunConfig) -> RunConfig:
    """The momentum rises over 170 steps, not 1,500, of which a sprint has fewer: no number of its own."""
    return override(config, "optim.momentum_steps=170")


@arm
def half_batch(config: RunConfig) -> RunConfig:
    """Half the batch, and more steps: with 4,096 tokens, too, 1.0990 against 1.1315 at 120 s (docs/log/training.md)."""
    batch = config.batch
    tokens = batch.sequences // 2 * batch.sequence_length
    return replace(config, batch=replace(batch, batch_tokens=tokens, micro_batch_tokens=tokens))


@arm
def muoneq_r(config: RunConfig) -> RunConfig:
    """Rows of the momentum are normalised before Newton-Schulz (MuonEq-R): lower perplexity than Muon's on LLaMA2 of 130M
    to 1B weights and C4 (Chang et al. 2026); parameter-golf records do it; no number on this track."""
    return override(config, "optim.equilibrate=true")


@arm
def normuon(config: RunConfig) -> RunConfig:
    """Each neuron's update is divided by its running size (NorMuon): 11.31% better training efficiency than Muon's with
    1.1B weights (Li et al. 2025); no number on this track."""
    return override(config, "optim.normuon=true")


@arm
def polar_express(config: RunConfig) -> RunConfig:
    """Polar Express in place of Muon's quintic: a lower loss of GPT-2 on 1 to 10 billion tokens of FineWeb at any
    learning rate (Amsel et al. 2025); no number on this track."""
    return override(config, "optim.coefficients=polar_express")


@arm
def cautious_decay(config: RunConfig) -> RunConfig:
    """Decay acts only where the update shrinks the weight too (Chen et al. 2025): in modded-nanogpt's records, no number."""
    return override(config, "optim.cautious_decay=true")


@arm
def decay_taper(config: RunConfig) -> RunConfig:
    """Weight decay falls with the learning rate: -0.0041 together with case operators (parameter-golf #1729)."""
    return override(config, "optim.decay_taper=true")


@arm
def token_dropout_005(config: RunConfig) -> RunConfig:
    """5% of the input tokens hidden in training, for text that is seen several times; no number of its own."""
    return override(config, "train.token_dropout=0.05")


@arm
def input_smear(config: RunConfig) -> RunConfig:
    """Each position's first 12 channels set its smear gate, and documents start afresh: in modded-nanogpt, no number."""
    return override(config, "model.smear=true", "model.smear_input=12")


@arm
def dense_connections(config: RunConfig) -> RunConfig:
    """Each block reads a learned sum of all earlier outputs, the static form of MUDD: -0.0041 (parameter-golf #1936)."""
    return override(config, "model.dense=true")


@arm
def parallel_blocks(config: RunConfig) -> RunConfig:
    """Attention and MLP of the last third read the same input, one form of parallel lanes: -0.002 (parameter-golf #1204)."""
    return override(config, f"model.parallel_layers={max(1, config.model.layers // 3)}")


@arm
def isolated_documents(config: RunConfig) -> RunConfig:
    """Attention, smear and bigrams stay inside a document; no number of its own."""
    return override(config, "model.isolate_documents=true")


@arm
def windowed_layers(config: RunConfig) -> RunConfig:
    """Attention sees half a sequence, in two layers of three; modded-nanogpt's records use windows, no number of its own."""
    layers = ",".join(str(layer) for layer in range(config.model.layers) if layer % 3 != 2)
    window = max(1, config.batch.sequence_length // 2)
    return override(config, f"model.window={window}", f"model.window_layers=[{layers}]")


@arm
def batch_grows(config: RunConfig) -> RunConfig:
    """Half the batch for the first 40% of the budget: -0.0119 by a smaller batch (autoresearch #44)."""
    batch = config.batch
    half = batch.sequences // 2 * batch.sequence_length
    return replace(config, batch=replace(batch, stages=((0.4, batch.sequence_length, half),)))


@arm
def adamw_sized_updates(config: RunConfig) -> RunConfig:
    """Muon's updates as large per number as AdamW's, 0.2, whatever a matrix's shape (Liu et al. 2025, who then use AdamW's
    learning rate); the rate here leaves a square matrix's update as it was; no number."""
    size = 0.2 * config.model.width**0.5
    return override(config, "optim.lr_scale=rms", f"optim.matrix_lr={config.optim.matrix_lr / size:.6g}")


@arm
def lion(config: RunConfig) -> RunConfig:
    """Lion in place of AdamW for what is no matrix, at a fifth of the learning rates and 5 times the decay: rates 3 to 10
    times smaller are suitable, and decay as many times larger (Chen et al. 2023); no number beside Muon."""
    rates = [f"optim.{n}={getattr(config.optim, n) / 5:.6g}" for n in ("embedding_lr", "head_lr", "scalar_lr")]
    decay = f"optim.adam_weight_decay={config.optim.adam_weight_decay * 5:.6g}"
    return override(config, "optim.other_algorithm=lion", "optim.beta2=0.99", decay, *rates)


@arm
def rates_of_width_256(config: RunConfig) -> RunConfig:
    """Learning rates taken as those of a model of width 256 and carried over to this width: the best ones then stay
    put (Yang et al. 2022); no number."""
    return override(config, "optim.tuned_width=256")


@arm
def no_hadamard(config: RunConfig) -> RunConfig:
    """Packing without Hadamard rotation, which gained -0.0002 before GPTQ (parameter-golf #670)."""
    return override(config, "quant.rotation=false")


@arm
def no_calibration(config: RunConfig) -> RunConfig:
    """Packing by the weights alone; GPTQ with full Hessians gained -0.0026 (parameter-golf #535)."""
    return override(config, "quant.calibration_tokens=0")


@arm
def no_activation_order(config: RunConfig) -> RunConfig:
    """GPTQ from the first column to the last, not by curvature; GPTQ's authors added that order, no number on this track."""
    return override(config, "quant.activation_order=false")


@arm
def no_pruning(config: RunConfig) -> RunConfig:
    """Rounding to nearest, never towards zero; the opposite, pruning 28 to 37%, was +0.004 (parameter-golf #670)."""
    return override(config, "quant.pruning=0")


@arm
def more_pruning(config: RunConfig) -> RunConfig:
    """Rounding towards zero twice as eagerly as the rate pays for; pruning 28 to 37%: +0.004 (parameter-golf #670)."""
    return override(config, "quant.pruning=2")


@arm
def low_rank_8(config: RunConfig) -> RunConfig:
    """Factors of rank 8 taken out of tensors where that pays; no number."""
    return override(config, "quant.low_rank=8")


@arm
def int6_rows(config: RunConfig) -> RunConfig:
    """Integers of 6 bits per row and lzma, as in the recipe of #549, in place of the solver; no number."""
    return override(config, "quant.method=rows", "quant.coder=lzma")


@arm
def int5_rows(config: RunConfig) -> RunConfig:
    """5 bits per row for matrices, 8 for embeddings, in place of the solver: +0.006 (parameter-golf #670)."""
    return override(config, "quant.method=rows", "quant.matrix_bits=5", "quant.min_matrix_bits=4")


@arm
def qat_soft(config: RunConfig) -> RunConfig:
    """Soft rounding in the last 20% of training, for --packed: -0.0002 (parameter-golf #670)."""
    return override(config, "quant.qat_share=0.2", "quant.qat_rounding=soft")


@arm
def qat_straight(config: RunConfig) -> RunConfig:
    """Straight-through rounding in the last 20% of training, for --packed; no number."""
    return override(config, "quant.qat_share=0.2", "quant.qat_rounding=straight")


def _heads(config: RunConfig, width: int) -> list[str]:
    """Heads as wide as the config's where that divides the width, else of 64 channels, and about as many queries to a key."""
    model = config.model
    heads = width // (model.head_width if width % model.head_width == 0 else 64)
    most = heads * model.kv_heads / model.heads
    kv_heads = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, most))
    return [f"model.heads={heads}", f"model.kv_heads={kv_heads}"]


def shape(layers: int, width: int) -> Change:
    """A model of so many layers and channels; the value embedding stays in the last layers."""

    def change(config: RunConfig) -> RunConfig:
        last = [layers - n for n in range(len(config.model.value_layers), 0, -1)]
        sizes = [f"model.layers={layers}", f"model.width={width}", f"model.value_layers={last}"]
        return override(config, *sizes, *_heads(config, width))

    change.__doc__ = (
        f"{layers} layers of width {width}. Depth beat width: a 12th layer of 512 gained -0.0068 over the cap, and width 576 "
        "lost (parameter-golf #686)."
    )
    return change


SHAPES = ((7, 640), (9, 576), (11, 640), (8, 512), (18, 384), (6, 768))
ARMS |= {f"{layers}x{width}": shape(layers, width) for layers, width in SHAPES}


def claim_of(name: str) -> str:
    return " ".join((ARMS[name].__doc__ or "").split())
