"""How arrays are split over devices: logical axis names on one side, mesh axes on the other, one table between.

Models name the dimensions of parameters and activations ("embed", "heads", "batch" ...) and know no mesh; layouts
make meshes and know no model. `sharding` holds the table that joins them, `mesh` the meshes.
"""
