"""The Triton kernels: one launch from scaled gradients to updated parameters.

Importing this package imports triton; :mod:`tritonamp` does so only where the Triton backend runs.

======== ==========================================================================
module   holds
======== ==========================================================================
table    the layout of the device table: where the tensors lie, what their groups ask
grid     the grid barrier, and who leaves last
norm     sums of squares that neither overflow nor vanish, and their combination
scale    the loss scale's state machine
rules    the update rules, as pure functions on values
step     the kernels: loads, stores and control flow around the above
======== ==========================================================================
"""
