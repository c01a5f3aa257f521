//! The REST API as its clients see it, with a real socket and a handler that records requests.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod attack;
mod client;
mod descriptors;
mod listen;
mod readers;
mod requests;
mod threads;
mod wire;
