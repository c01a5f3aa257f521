//! Requests as a driver sees them, by io_uring and without it.

mod hostile;
mod lifecycle;
mod limits;
mod model;
mod requests;
