"""Other packages' calls, served by Tilewise: replace the import, keep the code.

`tilewise.compat.flash_attn` has the calls of flash_attn 2.8; `bert_padding` and `rotary` what is used beside them.
`tilewise.compat.flex_attention` has those of torch.nn.attention.flex_attention.
Nothing here computes attention itself: it brings arguments into the form of the public calls of `tilewise`, and results
into the form that the other package's users know.
"""
