//! VDUSE devices, whose driver is a process of the host (Linux, `Documentation/userspace-api/vduse.rst`).

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{fstat, major, minor};

/// The default time in seconds that Linux waits for such a process.
const USUAL: u32 = 30;

/// The time that the kernel waits for an answer of the process behind a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MessageTimeout {
    /// The file with the setting.
    pub file: PathBuf,
    /// In seconds; 0 means without limit.
    pub seconds: u32,
}

impl MessageTimeout {
    /// The time-out of an open device; `None` unless it is a VDUSE device.
    pub(crate) fn of(device: impl AsFd) -> Option<Self> {
        let number = fstat(device).ok()?.st_rdev;
        Self::above(Path::new(&format!("/sys/dev/char/{}:{}", major(number), minor(number))))
    }

    /// The time-out of the VDUSE device that the folder `device` in sysfs is a part of.
    fn above(device: &Path) -> Option<Self> {
        let device = device.canonicalize().ok()?;
        let (file, text) = device.ancestors().find_map(|folder| {
            let file = folder.join("msg_timeout");
            fs::read_to_string(&file).ok().map(|text| (file, text))
        })?;
        Some(Self { file, seconds: text.trim().parse().ok()? })
    }

    /// The problem with the limit, if any: a start or stop of a queue waits this long for a process that hangs.
    pub(crate) fn complaint(&self) -> Option<String> {
        let limit = match self.seconds {
            1..=USUAL => return None,
            0 => "for ever".to_string(),
            seconds => format!("{seconds} s"),
        };
        let file = self.file.display();
        Some(format!(
            "a process of it that hangs is waited for {limit}, and its guest with it; write 1 to {USUAL} (seconds) \
             to {file}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_limit_is_found_only_in_a_folder_above_the_device() {
        let sys = tempfile::tempdir().unwrap();
        let device = sys.path().join("vduse/v0/v0/vhost-vdpa-3");
        fs::create_dir_all(&device).unwrap();
        let link = sys.path().join("245:3");
        std::os::unix::fs::symlink(&device, &link).unwrap();
        assert_eq!(MessageTimeout::above(&link), None);
        let file = sys.path().canonicalize().unwrap().join("vduse/v0/msg_timeout");
        fs::write(&file, "30\n").unwrap();
        assert_eq!(MessageTimeout::above(&link), Some(MessageTimeout { file, seconds: 30 }));
        assert_eq!(MessageTimeout::above(&sys.path().join("245:4")), None);
        assert_eq!(MessageTimeout::of(fs::File::open("/dev/null").unwrap()), None);
    }

    #[test]
    fn a_missing_or_high_message_limit_is_reported_with_a_remedy() {
        let complaint = |seconds| MessageTimeout { file: "/sys/x".into(), seconds }.complaint();
        assert_eq!((complaint(1), complaint(30)), (None, None));
        assert!(complaint(0).unwrap().contains("for ever") && complaint(31).unwrap().contains("31 s"));
        assert!(complaint(0).unwrap().ends_with("write 1 to 30 (seconds) to /sys/x"));
    }
}
