//! Requests as a driver sees them, with and without io_uring.

mod hostile;
mod lifecycle;
mod limits;
mod model;
mod partial;
mod requests;
mod translated;
mod zeroing;
