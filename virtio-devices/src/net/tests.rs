//! Frames and commands as a driver and a backend see them.

mod absent;
mod announce;
mod control;
mod lifecycle;
mod limits;
mod policy;
mod properties;
mod rates;
mod receive;
mod runner;
mod saved;
mod translated;
mod transmit;
