//! Guest memory in a file, loaded at once or page by page.
//!
//! | file | what it is |
//! |---|---|
//! | `page_faults` | memory that is read on demand, with `userfault` |
//! | `memory_image` | writing, checking and loading the file |
//! | `image_layout` | offsets of memory in the file |
//! | `present` | pages of memory that exist |
//! | `discarded` | persistent memory whose writes are in no file |

pub(crate) mod discarded;
pub(crate) mod image_layout;
pub(crate) mod memory_image;
pub(crate) mod page_faults;
pub(crate) mod present;
pub(crate) mod userfault;
