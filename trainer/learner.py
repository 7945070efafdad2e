"""The drafter at work: forward, loss, gradients, update. One per drafter thread; knows no files and no config file.

On CUDA everything runs on bfloat16 copies of the weights (fast_draft.py), with flex attention, compiled once; on the
CPU in float32 with scaled_dot_product_attention and the mask written out (flex attention has no backward there).
"""

# torch.compile and tolist are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from trainer import draft_kernels
from trainer.acceptance import answer_cycles, by_position
from trainer.blocks import Lists, dense_mask, make_blocks, tile_lists, tile_mask, whole_tiles
from trainer.compiled import compiled
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.fast_draft import Options, WorkingCopy, attention_of, forward
from trainer.features import FeatureBatch, RowBatch
from trainer.loss import ChunkLoss, LossTerms, Objective, Weighting, chunk_loss, loss_and_accepted
from trainer.optim import clip_scale, divide_gradients, gradient_norms, norms_of, step_if, total_norm
from trainer.streams import moved
from trainer.target import TargetModel
from trainer.update import Weight, adamw, update_weights


class Figures(NamedTuple):
    """What a step was like. nan or inf where it was not finite, nan also where no slot was supervised."""

    loss: float  # nats a slot, weighted (objective tv: a chance); comparable under one weighting and objective only
    accuracy: float  # share of supervised slots whose best token is the data's
    accept: float  # acceptance length, teacher-forced over the anchors drawn, bonus token included: 1 to T
    grad_norm: float  # of the whole gradient, before clipping
    finite: bool  # False: loss or gradient were not, and the step changed nothing
    accuracy_by_slot: list[float | None]  # for slots 1, 2, ...; None where no block had that slot supervised


class StepFigures:
    """A step's figures on their way to the host. Reading waits for that step, not for what was queued behind it."""

    def __init__(self, terms: LossTerms, grad_norm: Tensor, finite: Tensor) -> None:
        scalars = torch.cat((terms.figures().double(), torch.stack((grad_norm.double(), finite.double()))))
        values = torch.cat((scalars, terms.correct_P.double(), terms.supervised_P.double()))
        self._values = values.to("cpu", non_blocking=True)  # into page-locked memory, where it comes from a GPU
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))

    def read(self) -> Figures:
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, accuracy, accept, grad_norm, finite, *counts = cast(list[float], self._values.tolist())
        slots = len(counts) // 2
        by_slot = [c / n if n else None for c, n in zip(counts[:slots], counts[slots:], strict=True)]
        return Figures(loss, accuracy, accept, grad_norm, finite == 1, by_slot)


class Verdict(NamedTuple):
    """Whether a step is taken. On the device, so that the host needn't wait for it."""

    grad_norm: Tensor  # before clipping
    finite: Tensor  # bool: loss and gradient are
    good: Tensor  # bool: and something was supervised

    @classmethod
    def of(cls, terms: LossTerms, grad_norm: Tensor) -> "Verdict":
        finite = torch.isfinite(terms.loss_sum) & torch.isfinite(grad_norm)
        return cls(grad_norm, finite, finite & (terms.normaliser > 0))

    def to(self, device: torch.device) -> "Verdict":
        return Verdict(*(moved(tensor, device) for tensor in self))


@dataclass(frozen=True)
class Measured:
    """A batch measured at all of its anchors."""

    terms: LossTerms  # over all anchors: figures() gives the teacher-forced acceptance length over all of them
    accepted_BN: Tensor  # leading right slots of each block, on the device
    batch: FeatureBatch

    def answers(self) -> list[list[int]]:
        """What the cycles of a decoder would give in each answer of the rows (acceptance.py). Waits for the device.

        Raises ValueError when the batch held only some of the anchors.
        """
        rows = self.batch.rows
        anchors_BN, keep_BN = self.batch.blocks.anchors_BN.cpu().numpy(), self.batch.blocks.keep_BN.cpu().numpy()
        accepted_BN = self.accepted_BN.cpu().numpy()
        answers: list[list[int]] = []
        for row in range(rows.ids_BS.shape[0]):
            accepted_S = by_position(anchors_BN[row], keep_BN[row], accepted_BN[row], rows.ids_BS.shape[1])
            answers += answer_cycles(rows.loss_mask_BS[row].numpy(), rows.document_ids_BS[row].numpy(), accepted_S)
        return answers


@torch.no_grad()
def features_of(
    target: TargetModel,
    rows: RowBatch,
    draft: DraftConfig,
    device: torch.device,
    *,
    anchors: int | None = None,
    teacher: bool = False,
) -> FeatureBatch:
    """The target's part: features of the rows, the blocks and their embeddings, brought to the drafter's device.

    anchors: how many anchors of a row one forward takes; the rows may hold a multiple of it. None: all of them.
    teacher: the target runs to its end, for objectives that learn its distribution.
    """
    tokens = int((rows.document_ids_BS >= 0).sum())  # before it moves: rows are still on the CPU
    here = rows.to(target.device)
    anchors = anchors or here.anchors_BN.shape[1]
    if here.anchors_BN.shape[1] % anchors:
        raise ValueError(f"{here.anchors_BN.shape[1]} anchors a row are no multiple of {anchors}, what a forward takes")
    # [B, forwards, anchors of one]: each forward's slots are filled up by themselves.
    anchors_BGN, keep_BGN = (t.unflatten(1, (-1, anchors)).flatten(0, 1) for t in (here.anchors_BN, here.keep_BN))
    if device.type == "cuda":
        anchors_BGN, keep_BGN = whole_tiles(anchors_BGN, keep_BGN, draft.block_size)
    forward_blocks = anchors_BGN.shape[1]
    anchors_BN, keep_BN = (t.view(len(rows.ids_BS), -1) for t in (anchors_BGN, keep_BGN))
    # The documents' ids from the host: who needs their lengths there would wait for the GPU.
    where = here.ids_BS, rows.document_ids_BS, here.positions_BS
    final_BSH = None
    if teacher:
        features_BSF, final_BSH = target.features_and_final(*where, draft.target_layer_ids)
    else:
        features_BSF = target.features(*where, draft.target_layer_ids)
    blocks = make_blocks(
        here.ids_BS,
        here.loss_mask_BS,
        here.document_ids_BS,
        here.positions_BS,
        anchors_BN,
        keep_BN,
        block_size=draft.block_size,
        mask_token_id=draft.mask_token_id,
    )
    mask_id = torch.full((1,), draft.mask_token_id, device=target.device)
    return FeatureBatch(
        features_BSF=features_BSF,
        anchor_embeds_BNH=target.embedding(here.ids_BS.gather(1, anchors_BN)),
        mask_embed_H=target.embedding(mask_id)[0],
        positions_BS=here.positions_BS,
        blocks=blocks,
        forward_blocks=forward_blocks,
        tokens=tokens,
        rows=rows,
        final_BSH=final_BSH,
    ).to(device)


class Learner:
    """A drafter with its optimiser.

    A step is `learn` for each of its batches, then `update`. Gradients are sums until `update` divides them, once and
    before clipping, by the normaliser of the whole step. Replicas that share a step add up both, their gradients and
    their `step_terms`; every one then does what a single learner would have done, with the parts of `update`
    (replicas.py).
    """

    def __init__(
        self,
        model: DraftModel,
        head_VH: Tensor,
        optimizer: torch.optim.Optimizer,
        weighting: Weighting,
        *,
        chunk_blocks: int,
        clip: float,
        objective: Objective = "cross-entropy",
        copies: bool | None = None,
    ) -> None:
        """head_VH: the target's head, on the drafter's device. clip: highest gradient norm.

        copies: whether it computes on copies of the matrices as fast_draft.py does; None: on a GPU.
        """
        self.model, self.optimizer = model, optimizer
        self._objective: Objective = objective
        self._head_VH, self._weighting, self._chunk_blocks, self._clip = head_VH, weighting, chunk_blocks, clip
        self.device = head_VH.device
        on_gpu = self.device.type == "cuda"
        self._working: WorkingCopy | None = None
        self._forward: Callable[..., Tensor] = model
        if on_gpu if copies is None else copies:
            self._working = WorkingCopy(model, torch.bfloat16 if on_gpu else next(model.parameters()).dtype)
            self._forward = forward
        self._chunk: ChunkLoss = chunk_loss
        self._step: Callable[..., None] = adamw
        self._lists: Callable[..., Lists] = tile_lists
        if on_gpu:
            self._forward = cast(Callable[..., Tensor], compiled(self._forward))
            self._chunk = cast(ChunkLoss, compiled(chunk_loss))
            self._step, self._lists = compiled(adamw), compiled(tile_lists)
        self.step_terms: LossTerms | None = None  # of the step under way

    def terms(self, batch: FeatureBatch) -> LossTerms:
        """Forward and loss of a batch that one forward takes whole."""
        if batch.forwards() != 1:
            raise ValueError("only measure_all takes more anchors than one forward does")
        terms, _ = self._part(batch, 0)
        return terms

    def learn(self, batch: FeatureBatch) -> None:
        """Adds a batch's gradients to the step under way."""
        if self._working is not None and self.step_terms is not None:
            self._working.add_up()  # a sum of several batches is kept in float32, and so wants its own place
        terms = self.terms(batch)
        terms.loss_sum.backward()
        done = terms.detached()
        self.step_terms = done if self.step_terms is None else self.step_terms + done

    def update(self, lr: float) -> StepFigures:
        """Ends the step of a learner that is alone: gradients divided by its batches' normaliser, clipped, applied.

        A loss or gradient norm that is not finite, or a step with nothing supervised, leaves weights, moments and step
        counts as they are; on a GPU nothing here waits for it.
        """
        assert self.step_terms is not None, "update without learn"
        terms, parameters = self.step_terms, list(self.model.parameters())
        if self._working is None:
            divide_gradients(parameters, terms.normaliser)
            verdict = Verdict.of(terms, total_norm(gradient_norms(parameters)))
            self.apply(lr, verdict, parameters)
            return StepFigures(terms, verdict.grad_norm, verdict.finite)
        if any(self._working.is_matrix(p) and p.grad is not None for p in parameters):
            self._working.add_up()
        weights = self._working.weights_of(parameters)
        scale = 1 / terms.normaliser.clamp(min=1e-12)
        verdict = Verdict.of(terms, total_norm(norms_of([weight.gradient for weight in weights])) * scale)
        self._update(lr, weights, scale * clip_scale(verdict.grad_norm, self._clip), verdict.good)
        return StepFigures(terms, verdict.grad_norm, verdict.finite)

    def sum_up(self) -> None:
        """The step's gradients so far go where the trained weights have theirs: for who adds up several learners'."""
        if self._working is not None:
            self._working.add_up()

    @torch.no_grad()
    def _update(self, lr: float, weights: Sequence[Weight], scale: Tensor, good: Tensor) -> None:
        """The optimiser's step with copies that compute, gradients multiplied by `scale`; forgets them all."""
        assert self._working is not None
        self._set_rate(lr)
        update_weights(self.optimizer, weights, lr=lr, scale=scale, good=good, step=self._step)
        self._working.note(weights)
        self._forget()

    def _set_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self._working is not None:
            self._working.forget()
        self.step_terms = None

    def apply(self, lr: float, verdict: "Verdict", parameters: Sequence[nn.Parameter]) -> None:
        """Ends the step of these parameters, whose gradients are divided, and forgets all gradients and terms.

        verdict: on this device. Parameters that are left out must have no gradient: the optimiser takes all that have.
        """
        if self._working is not None:
            weights = self._working.weights_of(parameters)
            self._update(lr, weights, clip_scale(verdict.grad_norm, self._clip), verdict.good)
            return
        # A norm that is not finite leaves gradients that are not; no one reads them then.
        torch.nn.utils.clip_grads_with_norm_(parameters, self._clip, verdict.grad_norm)
        self._set_rate(lr)
        step_if(verdict.good, self.optimizer)
        self._forget()

    @torch.no_grad()
    def measure_all(self, batch: FeatureBatch) -> Measured:
        """A batch that is not learned from, at all its anchors: many forwards, all of the shape that `learn` has."""
        parts = [self._part(batch, index) for index in range(batch.forwards())]
        terms = parts[0][0]
        for more, _ in parts[1:]:
            terms = terms + more
        return Measured(terms, torch.cat([accepted_BN for _, accepted_BN in parts], dim=1), batch)

    def warm_up(self, batch: FeatureBatch) -> None:
        """Compiles everything that `learn` and `measure_all` will run, and leaves no trace in the drafter.

        batch: one as they will come, teacher included where the objective needs it.
        """
        terms, _ = self._part(batch, 0)
        terms.loss_sum.backward()
        with torch.no_grad():
            self._part(batch, 0)
            if self._working is not None:
                self._warm_up_update()
        self._forget()

    def _warm_up_update(self) -> None:
        """Each kind of weight once, on what belongs to nobody: gradients of one batch, and sums of several."""
        assert self._working is not None
        parameters, kinds = list(self.model.parameters()), set[tuple[object, ...]]()
        for weight in (*self._working.weights_of(parameters), *self._working.summed(parameters)):
            copy = weight.copy
            kind = weight.master.numel(), weight.gradient.dtype, None if copy is None else copy.dtype
            if kind in kinds:
                continue
            kinds.add(kind)
            like = torch.zeros_like(weight.master.detach())
            stand_in = Weight(
                nn.Parameter(like), torch.zeros_like(weight.gradient), None if copy is None else copy.clone()
            )
            optimizer = torch.optim.AdamW([stand_in.master])
            nothing = torch.zeros((), device=self.device)
            update_weights(optimizer, [stand_in], lr=0.0, scale=nothing, good=nothing > 0, step=self._step)

    def attention(self, row_tokens: int) -> tuple[bool, Options]:
        """attention_of; draft.py itself knows nothing of either."""
        if self._working is None:
            return False, ()
        return attention_of(self.device, self.model.config.head_dim, row_tokens)

    def _part(self, batch: FeatureBatch, index: int) -> tuple[LossTerms, Tensor]:
        """One forward and its loss; with the accepted slots of each block, [B, N]."""
        part, draft = batch.part(index), self.model.config
        blocks, row_tokens = part.blocks, part.positions_BS.shape[1]
        on_gpu = self.device.type == "cuda"
        merged, options = self.attention(row_tokens)
        if on_gpu:
            many, lists = draft.num_kv_heads if merged else 1, self._lists
            with torch.no_grad():  # whole numbers: one form for both, learning and measuring
                attention = tuple(tile_mask(blocks, row_tokens, sight, many, lists) for sight in draft.sights)
        else:
            attention = tuple(dense_mask(blocks, row_tokens, sight) for sight in draft.sights)
        if self._working is not None:
            self._working.refresh()
            lengths = row_tokens, blocks.positions_BQ.shape[1]
            hidden_BQH = self._forward(
                self._working.weights,
                self._working.shape,
                self.model.rotary.frequencies,
                part.features_BSF,
                part.anchor_embeds_BNH,
                part.mask_embed_H,
                part.positions_BS,
                blocks.positions_BQ,
                attention,
                merged,
                options,
                draft_kernels.kernels_for(part.features_BSF, draft.head_dim, tokens=lengths),
            )
        else:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
                hidden_BQH = self._forward(
                    part.features_BSF, part.embeds_BQH(), part.positions_BS, blocks.positions_BQ, attention
                )
        teacher_BNPH = part.teacher_BNPH() if self._objective != "cross-entropy" else None
        return loss_and_accepted(
            scaled(hidden_BQH, draft.logit_scale).unflatten(1, (blocks.anchors_BN.shape[1], -1)),
            self._head_VH,
            blocks.labels_BNP,
            blocks.label_mask_BNP,
            blocks.keep_BN,
            self._weighting,
            self._chunk_blocks,
            self._chunk,
            teacher_BNPH=None if teacher_BNPH is None else scaled(teacher_BNPH, draft.logit_scale),
            objective=self._objective,
        )


def scaled(hidden: Tensor, logit_scale: float) -> Tensor:
    """What the head reads where the target scales its logits: the head is linear, so the factor may come first."""
    return hidden if logit_scale == 1.0 else hidden * logit_scale
