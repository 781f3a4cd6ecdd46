"""Runs PTX on a CPU, as adversarially as PTX allows: what a kernel does on an NVIDIA GPU can be checked without one.

It is for the PTX that Mosaic makes of our kernels, and refuses by name what it does not know. Section numbers are those of the PTX
ISA 9.0, whose headings the code follows.

    program         PTX text -> instructions                      launch      Mosaic's MLIR dump -> grid, parameters, descriptors
    arithmetic      what instructions compute                     machine_code  operands resolved, equal operations batched
    operations      what others can see: memory, barriers         access      operands as functions of a warp
    tma, wgmma      what runs asynchronously                      warp        registers, and what is under way
    ampere          mma.sync, cp.async
    memory          bytes, bounds, alignment, swizzle             shadow      the race detector and the proxies
    barriers        mbarriers and their phases                    machine     thread blocks, schedules
    compiled        our kernels' PTX                              attention, experts, layout, rotary    our kernels' cases
    suite, agreement, contraction                                 report      what is run with what, what was found
    mutations       programs with one synchronisation less        trial, survivors    what catches them, why others are redundant

What is not modelled: lanes of a warp are never apart; registers that warpgroups trade; what ptxas does with the PTX; time.
"""
