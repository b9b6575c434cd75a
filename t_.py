from v0_6_prefix_cache.block_manager import BlockManager
system=list(range(100,140)); a=system+[1]*12; b=system+[2]*12
def tokens(ids): return lambda s,e: ids[s:e]
m=BlockManager(8,16)
m.allocate("A",52); print(m.block_table("A"), m.find_prefix(tokens(b),51))
m.publish("A",tokens(a)); p=m.find_prefix(tokens(b),51); print(p)
m.allocate("B",52,p); print(m.block_table("B"),[m.ref_count(x) for x in range(8)],m.num_free_blocks)
m.publish("B",tokens(b))
m.free("A"); print([m.ref_count(x) for x in range(8)], list(m._free))
m.free("B"); print(list(m._free), m.num_free_blocks)
c=[3]*70
print(m.find_prefix(tokens(c),69)); m.allocate("C",70); print(m.block_table("C"), list(m._free))
m.publish("C",tokens(c))
print(m.find_prefix(tokens(a),51),m.find_prefix(tokens(b),51))
m.free("C"); print(list(m._free))
import sys
from tests.kit.models import Successor
from tests.kit.tokenizers import byte_tokenizer
from v0_6_prefix_cache import LLMEngine, SamplingParams
from v0_6_prefix_cache.trace import tracer
engine = LLMEngine(Successor(), tokenizer=byte_tokenizer(), num_blocks=16, max_num_batched_tokens=64)
engine.on_step = tracer(engine.scheduler, sys.stdout, None)
system = [*b"You are a helpful assistant, brief and kind."]
print(len(system))
def ask(name, text, **params):
    engine.add_request(name, system+[*text], SamplingParams(temperature=0.0, max_tokens=3, **params))
    while engine.has_unfinished_requests(): engine.step()
ask("A", b" Why is the sky blue?")
ask("B", b" What is a prime?")
ask("A2", b" Why is the sky blue?")
ask("D", b" Name a colour.", n=3)
