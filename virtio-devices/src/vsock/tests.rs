//! A socket device as its driver and the host's programs see it.

mod device;
mod ends;
mod limits;
mod packets;
mod properties;
mod rig;
mod streams;
