"""What an edited request has to answer, computed with transformers in fp32 and without any of our code.

`model.Reference` holds keys as they are *before* RoPE, so an edit is a concatenation and the model's own
rotary embedding puts every key at its new position: nothing here turns a key by a difference of positions.
`rules` says which tokens the engine computes again.
"""
