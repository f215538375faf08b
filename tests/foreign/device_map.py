"""A tiny GPT-2, split across GPUs by transformers and accelerate. Checks logits, prints devices."""

import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=6, n_head=2)
GPT2LMHeadModel(config).save_pretrained(sys.argv[1])
tokens = torch.arange(8)[None]
expected = GPT2LMHeadModel.from_pretrained(sys.argv[1]).eval()(tokens).logits
spread = GPT2LMHeadModel.from_pretrained(sys.argv[1], device_map="balanced").eval()
found = spread(tokens.to("cuda:0")).logits
torch.testing.assert_close(found.cpu(), expected)
print(json.dumps(sorted({str(p.device) for p in spread.parameters()})))
