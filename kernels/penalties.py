"""Controls that act on logits, at every verified position with that position's own history.

Column i predicts the token after d_1 .. d_i, so its history is the committed one plus those drafts: column i counts
only if they were all accepted. Order (decision 12):

    bias        logit + bias
    repetition  logit / r if positive, else logit * r        tokens of the prompt or of the history
    presence    logit - presence * [count > 0]               counts of tokens generated in this turn
    frequency   logit - frequency * count
    masks       -inf where not allowed                       min_tokens and grammars

The kernel reads a lane's own tensors once for all of its columns; its results are the reference's, bit for bit.

Source: decision 12; the usual definitions (Keskar et al. 2019 for repetition, OpenAI's interface for the others).
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.launch_checks import require, require_contiguous
from kernels.logit_rows import load_whole
from kernels.masking import TokenMasks

TOKENS_PER_PROGRAM = 1024
ALIGNED = 16
"""Rows of results begin at multiples of so many logits, so that they are read in wide words."""


@dataclass(frozen=True)
class RowPenalties:
    """Per row: `repetition`, `presence`, `frequency` FP32 [B] (1, 0, 0: none); `bias` FP32 [B, V]; `in_prompt` bool
    [B, V]; `counts` FP32 [B, V], committed tokens of this turn, the anchor included."""

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    bias: torch.Tensor
    in_prompt: torch.Tensor
    counts: torch.Tensor


def adjust_logits(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    penalties: RowPenalties | None = None,
    masks: TokenMasks | None = None,
) -> torch.Tensor:
    """`logits` FP32 [B, W, V] over public rows, `drafts` int64 [B, >= W - 1] -> FP32 [B, W, V]; masks have W columns.
    Nothing is changed in place."""
    if penalties is None and masks is None:
        return logits
    run = adjust_logits_triton if logits.is_cuda else adjust_logits_reference
    return run(logits, drafts, penalties, masks)


def adjust_logits_reference(
    logits: torch.Tensor, drafts: torch.Tensor, penalties: RowPenalties | None, masks: TokenMasks | None
) -> torch.Tensor:
    width, vocabulary = logits.shape[1:]
    if penalties is not None:
        counts = penalties.counts[:, None].repeat(1, width, 1)
        for column in range(1, width):
            counts[:, column].scatter_add_(-1, drafts[:, :column], counts.new_ones(drafts.shape[0], column))
        logits = logits + penalties.bias[:, None]
        seen = penalties.in_prompt[:, None] | (counts > 0)
        repetition = penalties.repetition[:, None, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - penalties.presence[:, None, None] * (counts > 0)
        logits = logits - penalties.frequency[:, None, None] * counts
    return logits if masks is None else logits.masked_fill(masks.forbidden(vocabulary), -torch.inf)


@triton.jit
def _adjust(
    logits_ptr,
    out_ptr,
    drafts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    bias_ptr,
    in_prompt_ptr,
    counts_ptr,
    allowed_ptr,
    of_lane_ptr,
    lane_stride,
    column_stride,
    out_stride,
    drafts_stride,
    mask_bytes,
    width,
    count,
    TOKENS: tl.constexpr,
):
    """Program (chunk of tokens, lane): all columns of the lane."""
    lane = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists, whole = token < count, (tl.program_id(0) + 1) * TOKENS <= count
    mask_row = tl.full((), -1, tl.int64)
    if allowed_ptr is not None:
        mask_row = tl.load(of_lane_ptr + lane)
    if bias_ptr is not None:
        repetition = tl.load(repetition_ptr + lane)
        presence, frequency = tl.load(presence_ptr + lane), tl.load(frequency_ptr + lane)
        bias = tl.load(bias_ptr + lane * count + token, mask=exists, other=0.0)
        in_prompt = tl.load(in_prompt_ptr + lane * count + token, mask=exists, other=0) != 0
        counts = tl.load(counts_ptr + lane * count + token, mask=exists, other=0.0)
    for column in range(width):
        logit = load_whole(logits_ptr + lane * lane_stride + column * column_stride, token, whole, count)
        if bias_ptr is not None:
            if column > 0:
                draft = tl.load(drafts_ptr + lane * drafts_stride + column - 1)
                counts += (token == draft.to(tl.int32)).to(tl.float32)
            logit += bias
            generated = counts > 0
            repeated = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
            logit = tl.where(in_prompt | generated, repeated, logit)
            logit = logit - presence * generated.to(tl.float32)
            logit = logit - frequency * counts
        # two branches: the compiler takes the first, and without masks there is no pointer to follow
        if allowed_ptr is not None:  # noqa: SIM102
            if mask_row >= 0:
                at = allowed_ptr + (mask_row * width + column) * mask_bytes + (token >> 3)
                byte = tl.load(at, mask=exists, other=0).to(tl.int32)
                logit = tl.where(((byte >> (token & 7)) & 1) != 0, logit, float("-inf"))
        tl.store(out_ptr + (lane * width + column) * out_stride + token, logit, mask=exists)


def adjust_logits_triton(
    logits: torch.Tensor, drafts: torch.Tensor, penalties: RowPenalties | None, masks: TokenMasks | None
) -> torch.Tensor:
    """Raises ValueError naming a tensor that does not fit."""
    batch, width, vocabulary = logits.shape
    require("logits", logits, (batch, width, vocabulary), torch.float32)
    require("drafts", drafts, (batch, max(drafts.shape[1], width - 1)), torch.int64)
    if penalties is not None:
        for name in ("repetition", "presence", "frequency"):
            require_contiguous(name, getattr(penalties, name), (batch,), torch.float32)
        require_contiguous("bias", penalties.bias, (batch, vocabulary), torch.float32)
        require_contiguous("in_prompt", penalties.in_prompt, (batch, vocabulary), torch.bool)
        require_contiguous("counts", penalties.counts, (batch, vocabulary), torch.float32)
    mask_bytes = 0
    if masks is not None:
        mask_bytes = masks.allowed.shape[2]
        shape = len(masks.allowed), width, max(mask_bytes, -(-vocabulary // 8))
        require_contiguous("allowed", masks.allowed, shape, torch.uint8)
        require_contiguous("of_lane", masks.of_lane, (batch,), torch.int64)
    stride = -(-vocabulary // ALIGNED) * ALIGNED
    out = torch.empty(batch, width, stride, dtype=torch.float32, device=logits.device)
    if batch:
        _adjust[(triton.cdiv(vocabulary, TOKENS_PER_PROGRAM), batch)](
            *(logits, out, drafts),
            *(getattr(penalties, name, None) for name in ("repetition", "presence", "frequency")),
            *(getattr(penalties, name, None) for name in ("bias", "in_prompt", "counts")),
            *(getattr(masks, name, None) for name in ("allowed", "of_lane")),
            *(logits.stride(0), logits.stride(1), stride, drafts.stride(0), mask_bytes, width, vocabulary),
            TOKENS=TOKENS_PER_PROGRAM,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out[..., :vocabulary]
