"""Online DPO over worker groups of plain torch and transformers: generate, score, pair, update."""

import ray
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlctl.data_prep.arithmetic import generate
from rlctl.quickstart import real_path
from rlctl.workers import Dispatch, ResourcePool, Worker, dispatch, session, spawn

MODEL = real_path("quickstart")
BETA, N, MAX_TOKENS, PAD = 0.1, 8, 40, 0


def dispatch_data(group, data):
    """Split a dict of tensors (B, ...) into one dict for each worker."""
    parts = [value.tensor_split(group.world_size) for value in data.values()]
    return [dict(zip(data, each, strict=True)) for each in zip(*parts, strict=True)]


def collect_data(group, results):
    return torch.cat(results)


dispatch_mode = {"dispatch_fn": dispatch_data, "collect_fn": collect_data}


class LanguageModel(Worker):
    def __init__(self, rank_info):
        super().__init__(rank_info)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL).to(rank_info.device)

    def log_probs(self, data):
        """Return log π(response | prompt) of pairs (P, 2, T): (P, 2)."""
        ids, written = data["ids"].flatten(0, 1), data["written"].flatten(0, 1)
        logits = self.model(input_ids=ids, attention_mask=(ids != PAD).long()).logits[:, :-1]
        tokens = -F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        return (tokens * written[:, 1:]).sum(-1).view(-1, 2)


class SampleGenerator(LanguageModel):
    @dispatch(**dispatch_mode)
    def generate_sequences(self, data):
        """Return N responses to each left-padded prompt: (B, T) -> (B·N, MAX_TOKENS)."""
        ids, sampling = data["ids"], {"do_sample": True, "num_return_sequences": N}
        sampling |= {"max_new_tokens": MAX_TOKENS, "attention_mask": (ids != PAD).long()}
        found = self.model.generate(input_ids=ids, **sampling)[:, ids.shape[1] :]
        return F.pad(found, (0, MAX_TOKENS - found.shape[1]), value=PAD)

    @dispatch(Dispatch.BROADCAST)
    def load_weights(self, weights):
        self.model.load_state_dict(weights)


class ReferencePolicy(LanguageModel):
    @dispatch(**dispatch_mode)
    @torch.no_grad()
    def infer(self, data):
        return self.log_probs(data)


class DPOActor(LanguageModel):
    def __init__(self, rank_info, lr):
        super().__init__(rank_info)
        fully_shard(self.model)  # FSDP2 over the ranks of the pool; it averages the gradients
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    @dispatch(dispatch_fn=dispatch_data, collect_fn=lambda group, losses: sum(losses) / len(losses))
    def update(self, data):
        self.optimizer.zero_grad()
        ratio = self.log_probs(data) - data["ref_log_prob"]
        loss = -F.logsigmoid(BETA * (ratio[:, 0] - ratio[:, 1])).mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @dispatch(Dispatch.BROADCAST)
    def weights(self):
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))


def generate_pairwise_data(prompts, responses, scores, num_ranks):
    """Pair a best with a worst response of each prompt: (P, 2, T), P a multiple of `num_ranks`."""
    rows = (scores.max(1).values > scores.min(1).values).nonzero().flatten()
    rows = rows[: len(rows) // num_ranks * num_ranks, None]
    both = torch.stack([scores.argmax(1), scores.argmin(1)], 1)[rows[:, 0]]  # (P, 2)
    chosen = responses.view(len(scores), N, -1)[rows, both]  # (P, 2, R)
    written = F.pad(chosen != PAD, (prompts.shape[1], 0), value=False)
    return {"ids": torch.cat([prompts[rows].expand(-1, 2, -1), chosen], -1), "written": written}


@ray.remote(num_cpus=1)
def main_task(num_steps, num_processes=2, batch_size=32, lr=1e-4):
    tokenizer, history = AutoTokenizer.from_pretrained(MODEL, padding_side="left"), []
    with ResourcePool(num_processes) as pool:
        sample_gen, ref_policy = spawn(SampleGenerator, pool), spawn(ReferencePolicy, pool)
        dpo_policy = spawn(DPOActor, pool, lr=lr)
        for step in range(num_steps):
            rows = generate(batch_size, seed=step, level=2, careless=0.0, split="train")
            chats = [f"<|user|>{row.prompt[0]['content']}<|end|><|assistant|>" for row in rows]
            prompts = tokenizer(chats, padding=True, return_tensors="pt")["input_ids"]
            responses = sample_gen.generate_sequences({"ids": prompts})
            texts = tokenizer.batch_decode(responses)
            right = [f"#### {rows[i // N].ground_truth}<|end|>" in x for i, x in enumerate(texts)]
            scores = torch.tensor(right).float().view(-1, N)
            pairs = generate_pairwise_data(prompts, responses, scores, num_processes)
            pairs["ref_log_prob"] = ref_policy.infer(pairs)
            loss = dpo_policy.update(pairs)
            sample_gen.load_weights(dpo_policy.weights())
            history.append({"score": scores.mean().item(), "loss": loss})
    return history


if __name__ == "__main__":
    with session(num_cpus=4):
        print(*ray.get(main_task.remote(num_steps=20)), sep="\n")
