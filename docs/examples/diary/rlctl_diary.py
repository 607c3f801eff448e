"""A logger of rlctl in a package of its own: one line of text a step, in `diary.txt` of the run's folder."""


class Diary:
    def start(self, run):
        self.file = (run.folder / "diary.txt").open("a", encoding="utf-8")
        if not run.resume_step:
            print(f"{run.project}/{run.name}: {run.total_steps} steps", file=self.file, flush=True)
        return "diary.txt"

    def log(self, step, metrics):
        print(
            f"step {step}:",
            *(f"{name}={value:g}" for name, value in sorted(metrics.items())),
            file=self.file,
            flush=True,
        )

    def generations(self, step, samples):
        print(
            f"step {step}: {len(samples)} answers, {sum(each.right for each in samples)} right",
            file=self.file,
            flush=True,
        )

    def finish(self, state):
        print(state, file=self.file)
        self.file.close()
