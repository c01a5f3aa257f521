//! A switch with drivers at its ports and a socket in place of the uplink.

mod announce;
mod calls;
mod cycles;
mod fairness;
mod holders;
mod hostile;
mod hostile_rings;
mod keys;
mod link;
mod matrix;
mod offloads;
mod policy;
mod pressure;
mod rates;
mod rig;
mod stop;
mod streams;
mod translated;
mod uplink_rate;
mod x550;
