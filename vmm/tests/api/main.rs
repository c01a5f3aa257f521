//! The REST API as its clients see it: a real socket, and a handler that only takes notes.

mod attack;
mod client;
mod descriptors;
mod listen;
mod requests;
mod threads;
mod wire;
