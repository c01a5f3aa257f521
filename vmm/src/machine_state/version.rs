//! The versions of saved states.

/// The version of the states that this program saves. A state is read by the program that saved it and by the next two
/// versions.
pub const MACHINE_STATE_VERSION: u16 = 1;

/// True if this program reads states of this version.
pub const fn is_read(version: u16) -> bool {
    version == MACHINE_STATE_VERSION
}
