"""Other packages' calls, served by Tilewise: replace the import, keep the code.

`tilewise.compat.flash_attn` has the calls of flash_attn 2.8; `bert_padding` and `rotary` what is used beside them.
`tilewise.compat.flash_attn_3` has those of FlashAttention-3, `tilewise.compat.flash_mla` those of FlashMLA, and
`tilewise.compat.flex_attention` those of torch.nn.attention.flex_attention.
Nothing here computes attention itself: it brings arguments into the form of the public calls of `tilewise`, and results
into the form that the other package's users know.
"""
