//! The REST API as its clients see it: a real socket, and a handler that only takes notes.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "what fails here is a failed test")]

mod attack;
mod client;
mod descriptors;
mod listen;
mod requests;
mod threads;
mod wire;
