//! The REST API as its clients see it: a real socket, and a handler that only takes notes.

mod client;
mod descriptors;
mod listen;
mod threads;
mod wire;
