//! The log in a user-defined format: `--log-format`.

use std::io::Write;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use log::{LevelFilter, Log, Metadata, Record, SetLoggerError};
use vmm::LogOutput;

/// Format of a log line: text, and tokens such as `{msg}`. `{{` and `}}` are braces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Format(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Token(Token),
}

/// The value that replaces a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    /// Seconds since the program started.
    BootTime,
    /// The date and time in UTC (RFC 3339).
    WallClock,
    /// The name of the thread.
    Thread,
    /// The level as a word.
    Level,
    /// The level as a letter.
    LevelChar,
    /// The source file and line of the message.
    Location,
    /// The message.
    Message,
    /// The ID of the process.
    Pid,
    /// The ID of the thread.
    Tid,
    /// A part of the date and time.
    Time(Time, Zone),
}

/// A part of the date and time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Time {
    /// Month, day and time of day in the format of the library glog.
    Glog,
    Year,
    Month,
    Day,
    Hour,
    Minute,
    Second,
    Micros,
    Offset,
}

/// The time zone of a date or time token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Zone {
    Utc,
    Local,
}

impl Token {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "boottime" => Self::BootTime,
            "wallclock" => Self::WallClock,
            "thread" => Self::Thread,
            "level" => Self::Level,
            "levelchar" => Self::LevelChar,
            "location" => Self::Location,
            "msg" => Self::Message,
            "pid" => Self::Pid,
            "tid" => Self::Tid,
            name => match name.strip_prefix("local") {
                Some(name) => Self::Time(Time::named(name)?, Zone::Local),
                None => Self::Time(Time::named(name)?, Zone::Utc),
            },
        })
    }
}

impl Time {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "glog" => Self::Glog,
            "year" => Self::Year,
            "month" => Self::Month,
            "day" => Self::Day,
            "hour" => Self::Hour,
            "minute" => Self::Minute,
            "second" => Self::Second,
            "micros" => Self::Micros,
            "offset" => Self::Offset,
            _ => return None,
        })
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut parts, mut literal) = (Vec::new(), String::new());
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '{' | '}' if chars.next_if_eq(&c).is_some() => literal.push(c),
                '{' => {
                    let mut closed = false;
                    let name = chars.by_ref().take_while(|c| {
                        closed = *c == '}';
                        !closed
                    });
                    let name: String = name.collect();
                    if !closed {
                        return Err("a { has no }; write {{ for a brace".to_string());
                    }
                    let token = Token::named(&name).ok_or_else(|| {
                        format!("{{{name}}} is not a token; --help lists them, and {{{{ and }}}} are braces")
                    })?;
                    parts.push(Part::Text(std::mem::take(&mut literal)));
                    parts.push(Part::Token(token));
                }
                '}' => return Err("a } has no {; write }} for a brace".to_string()),
                c => literal.push(c),
            }
        }
        parts.push(Part::Text(literal));
        Ok(Self(parts))
    }
}

/// Time of a message.
#[derive(Debug, Clone, Copy)]
struct Moment {
    /// Since the program started.
    uptime: Duration,
    /// Since 1970, UTC.
    clock: Duration,
}

impl Moment {
    /// The date and time of a zone.
    fn in_zone(self, zone: Zone) -> libc::tm {
        let seconds = libc::time_t::try_from(self.clock.as_secs()).unwrap_or(libc::time_t::MAX);
        // SAFETY: all fields may be 0.
        let mut time = unsafe { std::mem::zeroed::<libc::tm>() };
        // SAFETY: both calls read the first and write the second, which live as long as the call. A year out of range
        // leaves zeroes.
        unsafe {
            match zone {
                Zone::Utc => libc::gmtime_r(&raw const seconds, &raw mut time),
                Zone::Local => libc::localtime_r(&raw const seconds, &raw mut time),
            }
        };
        time
    }

    fn text(self, part: Time, zone: Zone) -> String {
        let time = self.in_zone(zone);
        let micros = self.clock.subsec_micros();
        match part {
            Time::Glog => format!(
                "{:02}{:02} {:02}:{:02}:{:02}.{micros:06}",
                time.tm_mon + 1,
                time.tm_mday,
                time.tm_hour,
                time.tm_min,
                time.tm_sec
            ),
            Time::Year => format!("{:04}", i64::from(time.tm_year) + 1900),
            Time::Month => format!("{:02}", time.tm_mon + 1),
            Time::Day => format!("{:02}", time.tm_mday),
            Time::Hour => format!("{:02}", time.tm_hour),
            Time::Minute => format!("{:02}", time.tm_min),
            Time::Second => format!("{:02}", time.tm_sec),
            Time::Micros => format!("{micros:06}"),
            Time::Offset => {
                let minutes = time.tm_gmtoff.unsigned_abs() / 60;
                let sign = if time.tm_gmtoff < 0 { '-' } else { '+' };
                format!("{sign}{:02}:{:02}", minutes / 60, minutes % 60)
            }
        }
    }

    fn rfc3339(self) -> String {
        let part = |part| self.text(part, Zone::Utc);
        let date = [Time::Year, Time::Month, Time::Day].map(part).join("-");
        let time = [Time::Hour, Time::Minute, Time::Second].map(part).join(":");
        format!("{date}T{time}.{}Z", part(Time::Micros))
    }
}

impl Format {
    /// The line of a message, with its end.
    fn line(&self, record: &Record<'_>, moment: Moment) -> String {
        let mut line: String = self.0.iter().map(|part| part.text(record, moment)).collect();
        line.push('\n');
        line
    }
}

impl Part {
    fn text(&self, record: &Record<'_>, moment: Moment) -> String {
        let token = match self {
            Self::Text(text) => return text.clone(),
            Self::Token(token) => *token,
        };
        match token {
            Token::BootTime => format!("{:>10.6}", moment.uptime.as_secs_f64()),
            Token::WallClock => moment.rfc3339(),
            Token::Thread => thread_name(),
            Token::Level => record.level().to_string(),
            Token::LevelChar => record.level().as_str().chars().take(1).collect(),
            Token::Location => match (record.file(), record.line()) {
                (Some(file), Some(line)) => format!("{file}:{line}"),
                _ => record.target().to_string(),
            },
            // A message has one line, even if it quotes several.
            Token::Message => {
                let escaped = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
                record.args().to_string().chars().map(escaped).collect()
            }
            Token::Pid => std::process::id().to_string(),
            Token::Tid => rustix::thread::gettid().as_raw_nonzero().to_string(),
            Token::Time(part, zone) => moment.text(part, zone),
        }
    }
}

/// The name of the calling thread. The standard library has only the names of the first thread and of those that it
/// started, the kernel has all.
fn thread_name() -> String {
    match std::thread::current().name() {
        Some(name) => name.to_string(),
        None => rustix::thread::name().map_or_else(|_| "anonymous".into(), |name| name.to_string_lossy().into_owned()),
    }
}

/// A log in this format.
struct Logger {
    format: Format,
    start: Instant,
    to: Arc<LogOutput>,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let moment = Moment { uptime: self.start.elapsed(), clock };
            // In one call, so that lines of several threads do not mix. Never waits for a log that accepts no output.
            let _ = self.to.as_ref().write_all(self.format.line(record, moment).as_bytes());
        }
    }

    fn flush(&self) {}
}

/// Sends the messages of the whole program, up to `level`, to `to`.
///
/// # Errors
///
/// They are sent elsewhere already.
pub(crate) fn start(
    format: Format,
    level: LevelFilter,
    start: Instant,
    to: Arc<LogOutput>,
) -> Result<(), SetLoggerError> {
    // The C library reads the time zone's file once, which a confined thread could not do.
    let _ = Moment { uptime: Duration::ZERO, clock: Duration::ZERO }.in_zone(Zone::Local);
    log::set_logger(Box::leak(Box::new(Logger { format, start, to })))?;
    log::set_max_level(level);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Moment =
        Moment { uptime: Duration::from_micros(731_399), clock: Duration::from_micros(1_705_314_645_123_456) };

    fn line(format: &str, message: &str) -> String {
        let format: Format = format.parse().unwrap();
        let location = (Some("src/main.rs"), Some(7));
        format.line(
            &Record::builder()
                .level(log::Level::Warn)
                .file(location.0)
                .line(location.1)
                .target("target")
                .args(format_args!("{message}"))
                .build(),
            MOMENT,
        )
    }

    #[test]
    fn each_token_is_replaced_and_other_text_stays() {
        let name = std::thread::current().name().unwrap().to_string();
        assert_eq!(
            line("cloud-hypervisor: {boottime}s: <{thread}> {level}:{location} -- {msg}", "hello"),
            format!("cloud-hypervisor:   0.731399s: <{name}> WARN:src/main.rs:7 -- hello\n")
        );
        assert_eq!(line("{wallclock} {levelchar}{glog}", ""), "2024-01-15T10:30:45.123456Z W0115 10:30:45.123456\n");
        assert_eq!(
            line("{year}/{month}/{day} {hour}.{minute}.{second} {micros} {offset}", ""),
            "2024/01/15 10.30.45 123456 +00:00\n"
        );
        assert_eq!(
            line("{pid} {tid}", ""),
            format!("{} {}\n", std::process::id(), rustix::thread::gettid().as_raw_nonzero())
        );
    }

    #[test]
    fn a_thread_not_started_by_the_standard_library_has_its_name() {
        let line = || line("{thread}", "");
        assert_eq!(
            std::thread::Builder::new().name("std's".to_string()).spawn(line).unwrap().join().unwrap(),
            "std's\n"
        );
        let (said, says) = std::sync::mpsc::channel::<String>();
        extern "C" fn run(said: *mut libc::c_void) -> *mut libc::c_void {
            rustix::thread::set_name(c"posix's").unwrap();
            // SAFETY: the test hands its sender over to this thread.
            let said = unsafe { Box::from_raw(said.cast::<std::sync::mpsc::Sender<String>>()) };
            said.send(thread_name()).unwrap();
            std::ptr::null_mut()
        }
        let mut thread = 0;
        // SAFETY: the thread owns the sender, and a null pointer means the default attributes.
        let error = unsafe {
            libc::pthread_create(&raw mut thread, std::ptr::null(), run, Box::into_raw(Box::new(said)).cast())
        };
        assert_eq!(error, 0);
        assert_eq!(says.recv().unwrap(), "posix's");
        // SAFETY: the thread was started above, and is joined once.
        unsafe { libc::pthread_join(thread, std::ptr::null_mut()) };
    }

    #[test]
    fn local_time_differs_from_utc_by_its_offset() {
        let minutes = |zone: &str| {
            let text = line(&format!("{{{zone}day}} {{{zone}hour}} {{{zone}minute}}"), "");
            let numbers: Vec<i64> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
            (numbers[0] * 24 + numbers[1]) * 60 + numbers[2]
        };
        let offset = line("{localoffset}", "");
        let (hours, rest) = offset.trim_end()[1..].split_once(':').unwrap();
        let offset_minutes: i64 = hours.parse::<i64>().unwrap() * 60 + rest.parse::<i64>().unwrap();
        let offset_minutes = if offset.starts_with('-') { -offset_minutes } else { offset_minutes };
        assert_eq!(minutes("local") - minutes(""), offset_minutes);
        assert_eq!(line("{localglog}", "").len(), line("{glog}", "").len());
    }

    #[test]
    fn a_message_is_one_line() {
        assert_eq!(line("{msg}", "a\nb\u{1b}[31m"), "a\\nb\\u{1b}[31m\n");
    }

    #[test]
    fn braces_are_doubled_and_tokens_are_known() {
        assert_eq!(line("{{msg}} {msg}{{", "m"), "{msg} m{\n");
        assert_eq!(line("", "m"), "\n");
        for (wrong, said) in [
            ("{colour}", "{colour} is not a token"),
            ("{localmsg}", "{localmsg} is not a token"),
            ("{}", "{} is not a token"),
            ("{msg", "a { has no }"),
            ("msg}", "a } has no {"),
        ] {
            assert!(wrong.parse::<Format>().unwrap_err().starts_with(said), "{wrong}");
        }
    }
}
