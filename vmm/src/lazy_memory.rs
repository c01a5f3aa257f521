//! The guest's memory in a file, as a whole or page after page.
//!
//! | file | what it is |
//! |---|---|
//! | `page_faults` | memory that is read when it is used, by `userfault` |
//! | `memory_image` | the file: written, checked, and read as a whole |
//! | `image_layout` | where memory is in its file |
//! | `present` | which pages of the memory there are |
//! | `discarded` | persistent memory whose writes are in no file |

pub(crate) mod discarded;
pub(crate) mod image_layout;
pub(crate) mod memory_image;
pub(crate) mod page_faults;
pub(crate) mod present;
pub(crate) mod userfault;
