// upstream answers the scenarios of Rackloom's benchmarks with upstream's own allocator and CEL.
//
//	upstream allocate -mode first|sched|rotating [-pods N] [-limit SECONDS] < scenario.json
//	upstream cel [-seconds S] < expressions.json
//	upstream answers < expressions.json
//	upstream derivations < expressions.json
//	upstream outcomes < scenarios.json
//
// The scenario comes on standard input, the answer goes to standard output as one JSON object. Reading the
// scenario is in no figure. CPU time is that of the whole process, its garbage collector included.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "upstream:", err)
		os.Exit(1)
	}
}

func run(words []string, input io.Reader, output io.Writer) error {
	if len(words) == 0 {
		return fmt.Errorf("say allocate, cel, answers, derivations or outcomes")
	}
	flags := flag.NewFlagSet(words[0], flag.ContinueOnError)
	mode := flags.String("mode", "first", "first, sched or rotating")
	pods := flags.Int("pods", 0, "place this many pods at most; 0: all")
	limit := flags.Duration("limit", time.Hour, "end the last search after this time, unfinished")
	seconds := flags.Duration("seconds", time.Second, "CPU time for each figure of an expression")
	if err := flags.Parse(words[1:]); err != nil {
		return err
	}
	var answer any
	var err error
	switch words[0] {
	case "allocate":
		answer, err = allocate(input, *mode, *pods, *limit)
	case "cel":
		answer, err = evaluate(input, *seconds)
	case "answers":
		answer, err = answers(input)
	case "derivations":
		answer, err = derivations(input)
	case "outcomes":
		answer, err = outcomes(input)
	default:
		err = fmt.Errorf("%q: say allocate, cel, answers, derivations or outcomes", words[0])
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(output).Encode(answer)
}

// cpuSeconds is what all threads of this process have used so far, in user and system mode.
func cpuSeconds() float64 {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		panic(err) // its only cause is a wrong argument
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
}
