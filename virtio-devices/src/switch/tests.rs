//! A switch with drivers at its ports and a socket in the uplink's place.

mod calls;
mod fairness;
mod hostile;
mod link;
mod matrix;
mod offloads;
mod policy;
mod pressure;
mod rates;
mod rig;
mod stop;
