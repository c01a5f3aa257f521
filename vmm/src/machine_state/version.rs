//! Versions of saved states.

/// Version of the states that this program saves. The next two versions of the program read them as well.
pub const MACHINE_STATE_VERSION: u16 = 1;

/// True if this program reads states of `version`.
pub const fn is_read(version: u16) -> bool {
    version == MACHINE_STATE_VERSION
}
