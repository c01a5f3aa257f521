//! Requests as a driver sees them, by io_uring and without it.

mod hostile;
mod lifecycle;
mod model;
mod requests;
