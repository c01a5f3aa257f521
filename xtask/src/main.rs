//! The developer's and the newcomer's front door.

fn main() {}
