"""`attach` in the loops of others: Accelerate, Hugging Face's Trainer, Lightning.

Each of them wraps a model in DDP somewhere. What is here attaches it instead, in the same place,
and hands on what its loop asks of DDP: gradients that are only added up (`no_sync`), clipping, an
end. The loops stay theirs. A module is imported when its name is used: each needs its package.
"""
