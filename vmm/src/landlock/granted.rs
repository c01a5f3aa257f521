//! Accesses that a process was granted, as the kernel applies them: rules belong to files, not to their names, and a
//! folder's rules apply to all of its contents.

use std::collections::HashMap;
use std::path::Path;

use landlock::{AccessFs, BitFlags};

use super::error::LandlockError;
use super::host_file::HostFile;
use super::rule::Rule;

/// Granted accesses, by file.
#[derive(Debug, Default)]
pub(super) struct Granted(HashMap<(u64, u64), BitFlags<AccessFs>>);

impl Granted {
    /// Grants `access` to `file` and, if that is a folder, to all of its contents.
    pub(super) fn add(&mut self, file: &HostFile, access: BitFlags<AccessFs>) {
        *self.0.entry(file.id).or_default() |= access;
    }

    /// True if `access` to `file` was granted by a rule for that file.
    pub(super) fn has(&self, file: &HostFile, access: BitFlags<AccessFs>) -> bool {
        self.0.get(&file.id).is_some_and(|granted| granted.contains(access))
    }

    /// Checks that the accesses of `rules` were granted. A missing file is not an error here, but when it is opened.
    ///
    /// # Errors
    ///
    /// Fails with the first file without the access.
    pub(super) fn check(&self, rules: &[Rule]) -> Result<(), LandlockError> {
        let beyond = rules.iter().filter(|rule| rule.is_needed()).find(|rule| !self.allows(&rule.path, rule.access));
        beyond.map_or(Ok(()), |rule| Err(rule.beyond()))
    }

    fn allows(&self, path: &Path, access: BitFlags<AccessFs>) -> bool {
        let (Ok(path), Ok(file)) = (path.canonicalize(), HostFile::at(path)) else { return true };
        let mut lacking = file.legitimate(access);
        for folder in path.ancestors() {
            if let Some(access) = HostFile::at(folder).ok().and_then(|file| self.0.get(&file.id)) {
                lacking &= !*access;
            }
        }
        lacking.is_empty()
    }
}
