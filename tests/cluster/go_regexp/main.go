// go-regexp runs patterns with Go's regexp, which is what Kubernetes runs the patterns of selectors with.
//
// Each line of the input is a JSON object: a pattern and the subjects to search. Each line of the output says
// why the pattern is refused, or where it matches each subject, as pairs of byte offsets.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
)

type question struct {
	Pattern  string   `json:"pattern"`
	Subjects []string `json:"subjects"`
}

type answer struct {
	Refused string    `json:"refused"`
	Matches [][][]int `json:"matches"`
}

func main() {
	in := json.NewDecoder(bufio.NewReader(os.Stdin))
	out := bufio.NewWriter(os.Stdout)
	encoder := json.NewEncoder(out)
	for {
		var asked question
		err := in.Decode(&asked)
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = encoder.Encode(run(asked))
		}
		if err != nil {
			fail(err)
		}
	}
	if err := out.Flush(); err != nil {
		fail(err)
	}
}

func run(asked question) answer {
	pattern, err := regexp.Compile(asked.Pattern)
	if err != nil {
		return answer{Refused: err.Error(), Matches: [][][]int{}}
	}
	found := answer{Matches: make([][][]int, len(asked.Subjects))}
	for i, subject := range asked.Subjects {
		found.Matches[i] = append([][]int{}, pattern.FindAllStringIndex(subject, -1)...)
	}
	return found
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "go-regexp:", err)
	os.Exit(1)
}
