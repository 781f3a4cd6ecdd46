"""One engine on several devices: the mesh, what one device computes of the whole, and how arrays are cut for them."""
