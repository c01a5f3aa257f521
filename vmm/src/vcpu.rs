//! vCPUs: the threads that run them, and their exits.

pub mod cpu;
pub mod error;
pub(crate) mod gate;
pub mod pio;
pub mod placement;
pub mod stop;
