//! Builds that run ahead of the stages of `cargo xtask test` that need them, next to stages that leave processors idle.
//!
//! They have the lowest priority, so that they take no time from tests. The stages run the same builds again, and so
//! depend on nothing here: cargo finds the results, or waits for its lock on the folder until a build in progress has
//! ended. For the same reason all output is discarded: a build that fails here also fails in its stage, which says why.

use std::io;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The lowest priority (`sched(7)`, nice value).
const LOWEST: libc::c_int = 19;
/// Interval at which a running build is looked at.
const INTERVAL: Duration = Duration::from_millis(200);

/// A thread with builds, one after the other. A drop ends them.
pub(crate) struct Ahead {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ahead {
    /// Starts the builds. They must use other target folders or profiles than the stages next to them: a stage whose
    /// build waits for one with the lowest priority would lose time.
    pub(crate) fn start(builds: Vec<Command>) -> Ahead {
        let over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&over);
        let thread = thread::spawn(move || {
            // SAFETY: setpriority takes no pointers. On Linux it applies to this thread, and its children inherit it.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, LOWEST) };
            for mut build in builds {
                build.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                if let Ok(mut child) = build.spawn() {
                    // The outcome is found by the stage.
                    let _ = wait(&mut child, &ended);
                }
            }
        });
        Ahead { over, thread: Some(thread) }
    }
}

/// Waits until the build has ended, or ends it when `over` is set.
fn wait(build: &mut Child, over: &AtomicBool) -> io::Result<()> {
    while build.try_wait()?.is_none() {
        if over.load(Ordering::Relaxed) {
            build.kill()?;
            build.wait()?;
            return Ok(());
        }
        thread::sleep(INTERVAL);
    }
    Ok(())
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::time::Instant;

    use super::*;

    fn shell(folder: &Path, script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(folder);
        command
    }

    fn await_file(path: &Path) {
        let deadline = Instant::now() + Duration::from_secs(120);
        while !path.exists() {
            assert!(Instant::now() < deadline, "{} is missing", path.display());
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_build_that_fails_does_not_keep_the_next_from_running() {
        let folder = tempfile::tempdir().unwrap();
        let missing = Command::new(folder.path().join("no-such-program"));
        let builds = vec![missing, shell(folder.path(), "exit 1"), shell(folder.path(), "nice > new; mv new nice")];
        let ahead = Ahead::start(builds);
        await_file(&folder.path().join("nice"));
        drop(ahead);
        assert_eq!(fs::read_to_string(folder.path().join("nice")).unwrap().trim(), LOWEST.to_string());
    }

    #[test]
    fn a_drop_ends_the_running_build_and_starts_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let endless = "touch begun; while :; do sleep 1; done";
        let ahead = Ahead::start(vec![shell(folder.path(), endless), shell(folder.path(), "touch second")]);
        await_file(&folder.path().join("begun"));
        // It returns although the first build would never end.
        drop(ahead);
        assert!(!folder.path().join("second").exists());
    }
}
