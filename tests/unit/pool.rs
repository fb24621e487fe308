//! Tests of the pool of kernel threads.
//!
//! Every chunk runs once per launch, and a launch ends after the last of them.

use super::*;

struct Count(Vec<AtomicUsize>, u64);

impl Chunks for Count {
    fn chunk_count(&self) -> usize {
        self.0.len()
    }
    fn bytes(&self) -> u64 {
        self.1
    }
    fn run_chunk(&self, chunk: usize) {
        self.0[chunk].fetch_add(1, Ordering::Relaxed);
    }
}

pub(super) fn launch(pool: &Pool, launches: usize, chunks: usize, bytes: u64) {
    let count = Arc::new(Count((0..chunks).map(|_| AtomicUsize::new(0)).collect(), bytes));
    let job = Job::new(Arc::clone(&count));
    for launch in 1..=launches {
        pool.run(&job);
        assert!(count.0.iter().all(|c| c.load(Ordering::Relaxed) == launch));
    }
}

#[test]
fn a_pool_has_one_thread_to_1024_and_other_numbers_are_refused_and_not_brought_into_range() {
    for threads in [0, 1025, 100_000, usize::MAX] {
        let refused = Pool::new(threads).unwrap_err().to_string();
        assert_eq!(refused, format!("threads = {threads}: out of range; use 1 to 1024"));
    }
    assert_eq!([1, 2, 1024].map(|threads| Pool::new(threads).unwrap().threads()), [1, 2, 1024]);
}

#[test]
fn every_chunk_runs_once_per_launch_whatever_the_number_of_launchers() {
    let pool = Pool::new(3).unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            let pool = pool.clone();
            scope.spawn(move || launch(&pool, 200, 57, WAKE_BYTES));
        }
    });
}

/// Two chunks. The launcher stays in the first until a helper is inside the second. The second takes longer.
#[derive(Default)]
struct Together {
    begun: AtomicUsize,
    done: AtomicUsize,
}

impl Chunks for Arc<Together> {
    fn chunk_count(&self) -> usize {
        2
    }
    fn bytes(&self) -> u64 {
        WAKE_BYTES
    }
    fn run_chunk(&self, chunk: usize) {
        if chunk == 1 {
            self.begun.fetch_add(1, Ordering::Relaxed);
            thread::sleep(200 * WATCH);
        } else {
            let deadline = std::time::Instant::now() + Duration::from_secs(60);
            while self.begun.load(Ordering::Relaxed) == self.done.load(Ordering::Relaxed) / 2 {
                assert!(std::time::Instant::now() < deadline, "no helper came");
                thread::yield_now();
            }
        }
        self.done.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_launch_ends_after_the_chunks_of_its_helpers() {
    let pool = Pool::new(2).unwrap();
    let together = Arc::new(Together::default());
    let job = Job::new(Arc::clone(&together));
    for launch in 1..=10 {
        pool.run(&job);
        assert_eq!(together.done.load(Ordering::Relaxed), 2 * launch, "a launch ended before its chunks");
    }
}

/// The files in /proc that tell how much of a core each thread that ran a chunk has used.
#[cfg(target_os = "linux")]
struct Schedule(std::sync::Mutex<std::collections::BTreeSet<std::path::PathBuf>>);

#[cfg(target_os = "linux")]
impl Chunks for Arc<Schedule> {
    fn chunk_count(&self) -> usize {
        64
    }
    fn bytes(&self) -> u64 {
        WAKE_BYTES
    }
    fn run_chunk(&self, _: usize) {
        let thread = std::fs::read_link("/proc/thread-self").unwrap();
        self.0.lock().unwrap().insert(std::path::Path::new("/proc").join(thread).join("schedstat"));
        thread::sleep(Duration::from_micros(100));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_pool_without_work_uses_no_core() {
    let pool = Pool::new(3).unwrap();
    let schedule = Arc::new(Schedule(std::sync::Mutex::default()));
    let job = Job::new(Arc::clone(&schedule));
    while schedule.0.lock().unwrap().len() < 3 {
        pool.run(&job);
    }
    let files = schedule.0.lock().unwrap().clone();
    if !files.iter().all(|file| file.exists()) {
        return eprintln!("SKIPPED: this kernel does not say what a thread has used");
    }
    let own = std::path::Path::new("/proc").join(std::fs::read_link("/proc/thread-self").unwrap());
    let used = || -> Vec<String> {
        let helpers = files.iter().filter(|file| !file.starts_with(&own));
        helpers.map(|file| std::fs::read_to_string(file).unwrap()).collect()
    };
    // The figures of a helper that never sleeps change each time. Those of a helper that is about to sleep change
    // once.
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        let before = used();
        thread::sleep(Duration::from_millis(100));
        if used() == before {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "helpers still run: {before:?}");
    }
}
