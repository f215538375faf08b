"""The modules inside ``torch.vgpu``, as ``torch.cuda`` has them."""
