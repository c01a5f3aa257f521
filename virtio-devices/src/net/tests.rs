//! Frames and commands as a driver and a backend see them.

mod control;
mod lifecycle;
mod offload;
mod properties;
mod receive;
mod saved;
mod transmit;
