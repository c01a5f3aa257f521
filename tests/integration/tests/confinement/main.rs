//! Confinement of the VMM.

mod exploit;
mod landlock;
