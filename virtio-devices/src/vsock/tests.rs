//! A socket device as seen by its driver and the host's programs.

mod device;
mod ends;
mod limits;
mod packets;
mod properties;
mod rig;
mod streams;
